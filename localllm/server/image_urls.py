"""Pictures that requests name by addresses on the web, where ``--allow-image-urls`` lets them."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator, Sequence
from typing import Any

from localllm.cancellation import check_cancelled
from localllm.chat.conversation import IMAGE_KEYS, IMAGE_TYPES
from localllm.errors import UsageError
from localllm.web import fetch, is_web

#: Pictures of a request that are fetched at most.
_MAX_FETCHED = 32


#: A dict and the key of its value that is an address.
Place = tuple[dict[str, Any], str]


def picture_addresses(body: object) -> list[Place]:
    """Return the places of pictures' web addresses in any API's JSON."""
    return [(holder, key) for holder, key in _places(body) if is_web(holder[key])]


async def fetch_pictures(places: Sequence[Place], hosts: Sequence[str], max_bytes: int) -> None:
    """Replace the addresses at ``places`` by data URLs.

    Args:
        places: as `picture_addresses` returns them.
        hosts: hosts that may be asked, in the form of `localllm.web.fetch`.
        max_bytes: limit for all pictures together.
    """
    if len(places) > _MAX_FETCHED:
        raise UsageError(f"{len(places)} pictures are to be fetched; up to {_MAX_FETCHED} are: send data URLs")
    for holder, key in places:
        address = holder[key]
        try:
            page = await asyncio.to_thread(fetch, address, max_bytes + 1, hosts=hosts)
        except (OSError, UsageError, ValueError) as error:
            words = f"the picture at {address!r:.200} cannot be fetched ({error!s:.200}): send it as a data URL"
            raise UsageError(words) from None
        max_bytes -= len(page.data)
        if max_bytes < 0:
            raise UsageError(f"the picture at {address!r:.200} is too large: send a smaller one")
        holder[key] = f"data:;base64,{base64.b64encode(page.data).decode()}"


def _places(value: object) -> Iterator[Place]:
    """Where parts that are pictures have texts: as OpenAI's and Anthropic's APIs and the library write them."""
    pending = [value]
    while pending:
        check_cancelled()
        each = pending.pop()
        if isinstance(each, list):
            pending += reversed(each)
        elif isinstance(each, dict):
            if each.get("type") not in IMAGE_TYPES:
                pending += each.values()
                continue
            for key in IMAGE_KEYS:
                given = each.get(key)
                holder, name = (given, "url") if isinstance(given, dict) else (each, key)
                if isinstance(holder.get(name), str):
                    yield holder, name
