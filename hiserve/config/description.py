"""What is said of a setting beside its type and its default."""

from __future__ import annotations

from typing import Literal

from msgspec import Meta

Auto = Literal["auto"]
MAX_INT32 = 2**31 - 1  # pages, rows and lengths travel as int32


def about(
    text: str,
    *,
    unit: str | None = None,
    least: int | None = None,
    most: int | None = None,
    is_secret: bool = False,
) -> Meta:
    """Describes a setting: its help sentence, its unit, its range, and whether its value may be shown."""
    extra = {"unit": unit, "least": least, "most": most, "is_secret": is_secret}
    return Meta(description=text, extra_json_schema=extra)
