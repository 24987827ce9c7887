"""What `solodg evaluate` prints: the scores of every domain, as tables or as JSON lines."""

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from solodg.cli.console import out

if TYPE_CHECKING:
    from solodg.runs.evaluate import ScoredRecord
    from solodg.runs.operating_point import OperatingPoint
    from solodg.runs.scores import Scores
    from solodg.runs.temperature import Temperature

_MOST_CLASSES = 20  # in a table on the terminal; --json has all


def show_scores(
    scored: Sequence["ScoredRecord"],
    found: Sequence["Scores"],
    point: "OperatingPoint | None",
    temperature: "Temperature | None",
    json_: bool,
) -> None:
    """Prints the scores of every domain: as JSON lines, or as tables."""
    from solodg.runs.coverage import coverage, coverage_table
    from solodg.runs.tables import ROLES, UNSEEN, class_table, evaluation_table, threshold_table
    from solodg.runs.temperature import effect_text

    at_threshold = [
        point.scores(s.predictions, s.labels, s.groups) if point else {} for s in scored
    ]
    if json_:
        for domain, scores, chosen in zip(scored, found, at_threshold, strict=True):
            line = domain.record.model_dump() | {"scores": scores.to_json()}
            line["coverage"] = coverage(domain.predictions, domain.labels)
            if temperature:
                effect = temperature.effect(domain.predictions, domain.labels)
                line["temperature"] = {"temperature": temperature.temperature} | dict(
                    zip(("before", "after"), effect, strict=True)
                )
            if point:
                values = {name: value._asdict() for name, value in chosen.items()}
                line["threshold"] = point.to_json() | values
            sys.stdout.write(json.dumps(line, allow_nan=False) + "\n")
        return
    records = [domain.record for domain in scored]
    out.print(evaluation_table(records, found))
    for record, scores in zip(records, found, strict=True):
        if record.role in UNSEEN and len(scores.classes) <= _MOST_CLASSES:
            out.print(class_table(record.domain, scores))
    if point:
        rows = [(r.domain, ROLES[r.role]) for r in records]
        out.print(threshold_table(point.title(), rows, at_threshold))
    unseen = [s for s in scored if s.record.role in UNSEEN] or scored
    out.print(coverage_table([(s.record.domain, s.predictions, s.labels) for s in unseen]))
    if temperature:
        out.print(temperature.sentence())
        for s in unseen:
            change = effect_text(*temperature.effect(s.predictions, s.labels))
            out.print(f"On {s.record.domain} it would change {change}.")
    for text in dict.fromkeys(scores.remark() for scores in found):
        out.print(text)
