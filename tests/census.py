"""What a suite of many cases inside few tests has covered: counted while it runs, printed at the end of the run."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

__all__ = ["Census"]


class Census:
    """Counts the cases of each suite, and names those that it excepts."""

    def __init__(self) -> None:
        self._num_cases: dict[str, Counter[str]] = {}
        self._exceptions: dict[str, dict[str, str]] = {}

    def count(self, suite: str, outcome: str, num_cases: int = 1) -> None:
        """So many more cases of `suite` ended with `outcome` (such as "bitwise the same")."""
        self._num_cases.setdefault(suite, Counter())[outcome] += num_cases

    def exception(self, suite: str, name: str, reason: str) -> None:
        """The case `name` of `suite` was left out, or held to less, for that reason."""
        self._exceptions.setdefault(suite, {})[name] = reason

    def as_dict(self) -> dict[str, Any]:
        counts = {suite: dict(outcomes) for suite, outcomes in self._num_cases.items()}
        return {"num_cases": counts, "exceptions": self._exceptions}

    def add(self, other: Mapping[str, Any]) -> None:
        for suite, outcomes in other.get("num_cases", {}).items():
            for outcome, number in outcomes.items():
                self.count(suite, outcome, number)
        for suite, reasons in other.get("exceptions", {}).items():
            for name, reason in reasons.items():
                self.exception(suite, name, reason)

    def lines(self) -> list[str]:
        found = []
        for suite, counts in self._num_cases.items():
            found.append(f"{suite}: " + ", ".join(f"{number} {outcome}" for outcome, number in counts.items()))
            exceptions = self._exceptions.get(suite, {})
            found += [f"  except {name}: {reason}" for name, reason in sorted(exceptions.items())]
        return found
