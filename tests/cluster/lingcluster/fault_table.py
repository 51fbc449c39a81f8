"""What faults cost: the rows of docs/faults.md, as a session measured them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Fault:
    """One row.

    Attributes:
      fault: what was done.
      times: what was measured, such as "3.2 s".
      outcome: what came of it.
    """

    fault: str
    times: str
    outcome: str

    def row(self) -> str:
        """Return it as a row of a Markdown table."""
        return f"| {self.fault} | {self.times} | {self.outcome} |"


@dataclass
class FaultTable:
    """The rows of a session, in order of their tests."""

    rows: list[Fault] = field(default_factory=list)

    def record(self, fault: str, times: str, outcome: str) -> None:
        """Add a row; the terminal's summary shows it. docs/faults.md must have its fault."""
        self.rows.append(Fault(fault, times, outcome))
