"""Downloads of images that requests name by URL, if ``--allow-image-urls`` permits their hosts."""

from __future__ import annotations

import asyncio
import base64
import threading
import time
from collections.abc import Sequence
from functools import partial
from http.client import HTTPException
from typing import Any

from localllm.cancellation import check_cancelled
from localllm.chat.conversation import IMAGE_KEYS, IMAGE_TYPES
from localllm.errors import UsageError
from localllm.parallel import in_thread
from localllm.web import MAX_SECONDS, Page, fetch, is_web

#: Images that are fetched for a request.
_MAX_FETCHED = 32

#: A dict, and the key whose value is a URL.
Place = tuple[dict[str, Any], str]


def image_addresses(body: object) -> list[Place]:
    """Return the places of URLs of images in a request of OpenAI's, Anthropic's or another API."""
    addresses: list[Place] = []
    pending = [body]
    while pending:
        check_cancelled()
        node = pending.pop()
        if isinstance(node, list):
            pending += reversed(node)
        elif isinstance(node, dict):
            if node.get("type") not in IMAGE_TYPES:
                pending += node.values()
                continue
            for key in IMAGE_KEYS:
                image = node.get(key)
                holder, name = (image, "url") if isinstance(image, dict) else (node, key)
                if isinstance(holder.get(name), str) and is_web(holder[name]):
                    addresses.append((holder, name))
    return addresses


async def fetch_images(places: Sequence[Place], hosts: Sequence[str], max_bytes: int) -> None:
    """Replace the URLs at ``places`` by data URLs.

    Args:
        places: as `image_addresses` returns them.
        hosts: allowed hosts, in the form of `localllm.web.fetch`.
        max_bytes: limit for all images together.
    """
    if len(places) > _MAX_FETCHED:
        words = f"{len(places)} images have a web address, but up to {_MAX_FETCHED} are fetched: send data URLs"
        raise UsageError(words)
    end = time.monotonic() + MAX_SECONDS  # of all images
    for holder, key in places:
        address = holder[key]
        try:
            page = await _fetched(address, max_bytes + 1, hosts, end - time.monotonic())
        except (OSError, UsageError, ValueError, HTTPException) as error:
            reason = str(error) or "it takes too long"  # asyncio's TimeoutError has no text
            words = f"the image at {address!r:.200} cannot be fetched ({reason:.200}): send it as a data URL"
            raise UsageError(words) from None
        max_bytes -= len(page.data)
        if max_bytes < 0:
            raise UsageError(f"the image at {address!r:.200} is too large: send a smaller one")
        holder[key] = f"data:;base64,{base64.b64encode(page.data).decode()}"


async def _fetched(address: str, max_bytes: int, hosts: Sequence[str], seconds: float) -> Page:
    """Fetch a page in a daemon thread, which does not delay the end of the program.  Cancellation stops it."""
    is_stopped = threading.Event()
    work = partial(fetch, address, max_bytes, hosts=hosts, is_stopped=is_stopped.is_set, seconds=seconds)
    try:
        # The thread has no timeout while it resolves a name.
        return await asyncio.wait_for(asyncio.wrap_future(in_thread(work, "localllm-fetch")), max(0.0, seconds))
    finally:
        is_stopped.set()
