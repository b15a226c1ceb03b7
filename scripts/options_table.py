"""The tables of `docs/options.md`, made from the options themselves.

python -m scripts.options_table            prints them
python -m scripts.options_table --write    puts them into the page
"""

from __future__ import annotations

import sys
from pathlib import Path

from impress_sglang.config import ImpressConfig
from impress_sglang.options import OPTIONS, Option

PAGE = Path(__file__).parents[1] / "docs/options.md"
BEGIN, END = (
    "<!-- options: made by `python -m scripts.options_table --write` -->",
    "<!-- /options -->",
)
GROUPS = {
    "Store": "ssd_dir ssd_gb min_free_gb write_after min_prefix_tokens approximation_depth "
    "chunk_tokens",
    "Precision and retention": "bits base_error retention min_retention load",
    "Memory": "device_gb host_gb buffer_gb recompute_gb half_life",
    "Queue": "lookahead schedule",
    "Disk": "readahead io_engine io_depth io_timeout trace_dir",
    "Comparison": "policy allocate probe_heads alpha reorder_interval reorder_key",
}


def tables() -> str:
    """One table per group, in Markdown."""
    options = {option.field: option for option in OPTIONS}
    parts = []
    for name, fields in GROUPS.items():
        rows = [_row(options.pop(field)) for field in fields.split()]
        header = ["| flag | default | values | meaning |", "|---|---|---|---|"]
        parts.append("\n".join([f"### {name}", "", *header, *rows]))
    assert not options, f"give these options a group: {', '.join(options)}"
    return "\n\n".join(parts)


def _row(option: Option) -> str:
    default = getattr(ImpressConfig(), option.field)
    shown = f"{default:g}" if isinstance(default, float) else str(default)
    cell = f"`{shown}`" if shown else "none"
    values = option.rule.expected.removeprefix("one of ").removesuffix(" and finite")
    cells = (f"`{option.flag}`", cell, values, option.help)
    return f"| {' | '.join(text.replace('*', chr(92) + '*') for text in cells)} |"


def page_with_tables(page: str) -> str:
    """The page with the tables between its two marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(tables())
