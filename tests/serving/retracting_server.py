"""SGLang that takes requests out and puts them back all the time."""

from __future__ import annotations

from sglang.srt.managers import scheduler

scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = True, 25
