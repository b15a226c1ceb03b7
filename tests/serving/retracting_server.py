"""SGLang that takes requests out and puts them back, if its variables for that are set.

It reads them while it is imported, which in a forked server was long ago.
"""

from __future__ import annotations

from sglang.srt.environ import envs
from sglang.srt.managers import scheduler

scheduler.TEST_RETRACT = envs.SGLANG_TEST_RETRACT.get()
scheduler.TEST_RETRACT_INTERVAL = envs.SGLANG_TEST_RETRACT_INTERVAL.get()
