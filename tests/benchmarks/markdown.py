"""Tables of the comparison for docs/speed.md; figures below the goal are bold."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, zip_longest

from tests.benchmarks.results import Kind, Line, Memory, Record, figure, memory_limit

#: Order of the formats; other formats follow.
FORMATS = ("Q4_0", "Q8_0", "Q4_K_M", "Q5_K_M", "Q6_K", "F16")
#: Tables after the table of short prompts: caption, kinds of lines, and the other side of the comparison.
SMALL_TABLES: tuple[tuple[str, tuple[Kind, ...], str], ...] = (
    ("Long contexts", ("deep prefill", "deep decode"), "llama.cpp"),
    ("Several sequences at once", ("batch",), "one sequence"),
    ("Small models", ("small",), "llama.cpp"),
    ("Start, in seconds to the first token", ("start",), "llama.cpp"),
)

Row = list[str]


def markdown(records: Sequence[Record]) -> str:
    lines = sorted((record for record in records if isinstance(record, Line)), key=_order)
    memory = sorted((record for record in records if isinstance(record, Memory)), key=lambda record: record.model)
    parts = [_speed_table([line for line in lines if line.kind in ("prefill", "decode")])]
    for caption, kinds, against in SMALL_TABLES:
        parts.append(_small_table(caption, [line for line in lines if line.kind in kinds], against))
    parts.append(_memory_table(memory))
    text = "\n\n".join(filter(None, parts))
    return f"{text}\n\nBold figures are below the goal." if "**" in text else text


def _speed_table(lines: Sequence[Line]) -> str:
    """Return the table of short prompts, with prefill and decoding in one row."""
    titles = ["model", "format", "threads"]
    titles += ["prefill", "llama.cpp", "ratio", "% of this format's peak", "% of the fastest format's peak"]
    titles += ["decode", "llama.cpp", "ratio", "% of the bandwidth"]
    return _table(titles, _speed_rows(lines))


def _speed_rows(lines: Sequence[Line]) -> Iterator[Row]:
    for _, group in groupby(lines, _order):
        alike = list(group)
        # several of a kind if files in different folders have the same name
        prefills, decodes = ([line for line in alike if line.kind == kind] for kind in ("prefill", "decode"))
        for prefill, decode in zip_longest(prefills, decodes):
            highest = prefill and prefill.share_of_highest
            shares = ["" if highest is None else f"{highest:.0%}"]
            yield [*_place(alike[0]), *_figures(prefill), *shares, *_figures(decode)]


def _small_table(caption: str, lines: Sequence[Line], against: str) -> str:
    titles = ["model", "format", "threads", "test", "localllm", against, "ratio", "% of the bandwidth", "note"]
    rows = ([*_place(line), line.test, *_figures(line), line.note] for line in lines)
    return _table(titles, rows, caption)


def _memory_table(records: Sequence[Memory]) -> str:
    titles = ["model", "peak, MiB", "at most, MiB", "times the file, without the cache"]
    return _table(titles, map(_memory_row, records), "Memory")


def _memory_row(record: Memory) -> Row:
    peak, limit = (f"{n / 2**20:,.0f}" for n in (record.peak, memory_limit(record.file, record.cache)))
    return [record.model, _marked(peak, short=any(record.faults())), limit, f"{record.times_the_file:.2f}"]


def _table(titles: Row, rows: Iterable[Row], caption: str = "") -> str:
    """Return a table without empty columns, or an empty string if there are no rows."""
    found = list(rows)
    filled = [i for i in range(len(titles)) if any(row[i] for row in found)]
    lines = [f"| {' | '.join(row[i] for i in filled)} |" for row in (titles, ["---"] * len(titles), *found)]
    return "\n".join([f"{caption}:\n"] * bool(caption) + lines) if found else ""


def _order(line: Line) -> tuple[str, int, str, int]:
    rank = FORMATS.index(line.format) if line.format in FORMATS else len(FORMATS)
    return _model(line), rank, line.format, line.threads


def _place(line: Line) -> Row:
    return [_model(line), line.format, str(line.threads)]


def _model(line: Line) -> str:
    """Return the name of the model without the format at its end."""
    return re.sub(rf"[-_.]{re.escape(line.format)}$", "", line.model, flags=re.IGNORECASE)


def _figures(line: Line | None) -> Row:
    """Return both rates, their ratio, and the share of the peak or of the bandwidth."""
    if line is None:
        return [""] * 4
    share = "" if line.share is None else _marked(f"{line.share:.0%}", short=line.share_is_short)
    return [figure(line.ours), figure(line.theirs), _marked(f"{line.ratio:.2f}", short=line.ratio_is_short), share]


def _marked(text: str, *, short: bool) -> str:
    return f"**{text}**" if short else text
