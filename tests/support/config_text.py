# A tollgate.yaml that can run, for tests of commands.

from __future__ import annotations

from pathlib import Path


def write_config(path: Path, database_url: str, redis_url: str, upstream_url: str = "http://127.0.0.1:9/v1") -> Path:
    """Write the smallest configuration that every command accepts, its data beside it; return the path."""
    path.write_text(
        f"database_url: {database_url}\n"
        f"redis_url: {redis_url}\n"
        f"data_dir: {path.parent / 'data'}\n"
        "admin_keys: [tgadmin-of-the-tests]\n"
        "key_pepper: pepper of all the tests\n"
        "drain: 2s\n"
        "lame_duck: 0s\n"
        f"providers: {{upstream: {{format: openai, endpoints: [{{region: here, base_url: '{upstream_url}'}}]}}}}\n"
        "models: {small: {provider: upstream, price: {input: 1, output: 2}, context: 1000, max_output: 100}}\n"
    )
    return path
