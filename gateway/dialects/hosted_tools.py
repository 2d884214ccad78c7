# What a tool that the upstream runs may ask for in a request. Which of them a provider may run, its settings say.

from __future__ import annotations

from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from gateway.dialects.checks import require, require_between
from protocol.errors import UnsupportedParameter
from protocol.responses import ResponsesTool

SMALLEST = "1g"  # memory of the container that a price is of
FOUND_AT_MOST = 50  # by a search in files


def check_hosted(tool: ResponsesTool, where: str) -> None:
    """Refuse what no price covers, and what belongs to no caller: files and containers of the provider's account.
    Raises BadRequest."""
    if (check := CHECKS.get(tool.type)) is not None:
        require(tool.defer_loading is None, f"{where}.defer_loading", f"'{where}' cannot be loaded later.")
        check(tool, where)


def _check_files(tool: ResponsesTool, where: str) -> None:
    require(bool(tool.vector_store_ids), f"{where}.vector_store_ids", f"'{where}' needs 'vector_store_ids'.")
    require_between(tool.max_num_results, 1, FOUND_AT_MOST, f"{where}.max_num_results")


def _check_code(tool: ResponsesTool, where: str) -> None:
    asked = tool.container
    is_new = isinstance(asked, dict) and asked.get("type") == "auto" and not asked.keys() - {"type", "memory_limit"}
    right = 'Send {"type": "auto"}: files, containers and networks of the provider\'s account are no caller\'s.'
    require(is_new, f"{where}.container", f"'{where}.container' is not supported. {right}")
    assert isinstance(asked, dict)
    if asked.get("memory_limit") not in (None, SMALLEST):
        words = f"What a container with more memory than '{SMALLEST}' costs is in no price that is known here."
        raise UnsupportedParameter(words, param=f"{where}.container.memory_limit")


def _check_pictures(tool: ResponsesTool, where: str) -> None:
    if tool.partial_images:
        words = "What pictures cost that are shown before they are whole is in no price that is known here."
        raise UnsupportedParameter(f"{words} Leave 'partial_images' out.", param=f"{where}.partial_images")
    mask = {"image_url": "data:image/"} if tool.input_image_mask is None else tool.input_image_mask
    is_here = mask.keys() == {"image_url"} and str(mask["image_url"]).startswith("data:image/")
    words = "A mask is a data URL in 'image_url': no files are kept, and none is fetched."
    require(is_here, f"{where}.input_image_mask", words)


def _check_server(tool: ResponsesTool, where: str) -> None:
    require(bool(tool.server_label), f"{where}.server_label", f"'{where}' needs a 'server_label'.")
    words = f"'{where}' needs either a 'server_url' or a 'connector_id'."
    require((tool.server_url is None) != (tool.connector_id is None), f"{where}.server_url", words)
    if tool.server_url is not None:
        words = f"'{where}.server_url' must be an https address without a user and a password in it."
        require(_is_plain(tool.server_url), f"{where}.server_url", words)


def _is_plain(url: str) -> bool:
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0
        return parts.scheme == "https" and has_host and "@" not in parts.netloc and "\\" not in url
    except ValueError:
        return False


CHECKS: Mapping[str, Callable[[ResponsesTool, str], None]] = {
    "file_search": _check_files,
    "code_interpreter": _check_code,
    "image_generation": _check_pictures,
    "mcp": _check_server,
}
