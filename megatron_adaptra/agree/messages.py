"""Messages between the leader and members, and the check that refuses malformed ones.

Every message has its `kind`, and its `run`, named by the first iteration. `alive` and `lost` are
about the connection alone: it works, and one direction of it does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_adaptra.base.errors import BadMessage
from megatron_adaptra.measure.reduction_report import ReductionReport
from megatron_adaptra.measure.report import StageReport

Check = type | tuple[type, ...]
_NUMBER = (int, float)
Report = StageReport | ReductionReport

# The kinds of messages that carry reports, with the class of each report.
REPORTS: Mapping[str, type[Report]] = {"report": StageReport, "reduction": ReductionReport}
KINDS: Mapping[str, Mapping[str, Check]] = {
    "alive": {},
    "lost": {},
    "bye": {},
    "propose": {"number": int, "swap": int, "bundle": str, "digest": str, "key": str},
    "ack": {"number": int, "digest": str},
    "decision": {"number": int, "commit": bool},
    "status": {"status": dict},
    **{kind: {"report": dict} for kind in REPORTS},
}
STATUS: Mapping[str, Check] = {
    "iteration": int, "delays": dict, "alarms": list, "replans": int, "predicted": _NUMBER,
    "lower_bound": _NUMBER,
}  # fmt: skip


def checked(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `message` if all fields are there and of their types; else raise BadMessage.

    The `report` of one of REPORTS is an object of that class from here on.
    """
    kind = message.get("kind")
    fields = KINDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise BadMessage(f"a message of kind {str(kind)[:40]!r}; there are {', '.join(KINDS)}")
    for name, types in {"run": int, **fields}.items():
        if not _is(message.get(name), types):
            raise BadMessage(
                f"a message of kind {kind!r} with {name} {str(message.get(name))[:40]!r}"
            )
    status = message["status"] if kind == "status" else {}
    for name, value in status.items():
        if name not in STATUS or not _is(value, STATUS[name]):
            raise BadMessage(f"a status with {str(name)[:40]!r} {str(value)[:40]!r}")
    if not all(_is(seconds, _NUMBER) for seconds in status.get("delays", {}).values()):
        raise BadMessage("a status with delays that are no numbers")
    if not all(_is(link, str) for link in status.get("alarms", [])):
        raise BadMessage("a status with alarms that are no links")
    if isinstance(kind, str) and kind in REPORTS:
        return {**message, "report": REPORTS[kind].from_json(message["report"])}
    return dict(message)


def message_of(report: Report) -> dict[str, Any]:
    """Make the message that carries a `report`."""
    kind = next(kind for kind, cls in REPORTS.items() if type(report) is cls)
    return {"kind": kind, "report": report.to_json()}


def _is(value: object, types: Check) -> bool:
    """Return whether `value` is of one of `types`; True and False do not count as numbers."""
    return type(value) in (types if isinstance(types, tuple) else (types,))
