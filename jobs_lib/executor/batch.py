"""A batch: statements of one transaction, each with a reader for its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from jobs_lib.executor.round_trip import Answer, Statement

Reader: TypeAlias = "Callable[[list[tuple[Any, ...]]], object]"
"""Reads the rows of one statement."""
Question: TypeAlias = "tuple[Statement, Reader]"
"""A statement, and the reader of its rows."""


class Batch:
    """Questions that are sent together, and their answer once it has come."""

    __slots__ = ("answer", "questions", "then")

    def __init__(
        self,
        questions: Iterable[Question] = (),
        then: Callable[[], object] | None = None,
    ) -> None:
        """Wait for an answer.

        Args:
            questions: in the order in which they are sent and read.
            then: called when the whole answer has been read.
        """
        self.questions = [*questions]
        self.then = then
        self.answer: Answer | None = None
        """None until the batch is known to have committed."""

    def __bool__(self) -> bool:
        return bool(self.questions)

    @property
    def statements(self) -> list[Statement]:
        """The statements to send."""
        return [statement for statement, _ in self.questions]

    def read(self) -> None:
        """Give each reader its rows, if the batch has committed."""
        if self.answer is None:
            return
        for (_, reader), rows in zip(self.questions, self.answer, strict=True):
            reader(rows)
        if self.then is not None:
            self.then()


def ignore(rows: list[tuple[Any, ...]]) -> None:
    """Read nothing: the statement returns nothing new."""
