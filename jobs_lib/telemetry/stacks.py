"""Where code stands still: the stacks of threads and tasks, as text."""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio


def read_stack(thread: int) -> str:
    """Read a thread's stack; "" if that fails, as it may with any code."""
    try:
        frame = sys._current_frames().get(thread)
        return "".join(traceback.format_stack(frame)) if frame else ""
    except Exception:
        return ""


def read_task(task: asyncio.Task[Any]) -> str:
    """Follow what each coroutine awaits: the task itself knows only the first one."""
    frames = []
    coroutine: Any = task.get_coro()
    while frame := getattr(coroutine, "cr_frame", None):
        frames.append((frame, frame.f_lineno))
        coroutine = coroutine.cr_await
    return "".join(traceback.StackSummary.extract(frames).format())
