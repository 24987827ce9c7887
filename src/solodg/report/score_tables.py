"""The tables of a report with all metrics of the unseen domains, and their intervals."""

from collections.abc import Sequence
from typing import Any

from solodg.report.predictions import DomainPredictions
from solodg.runs.scores import score
from solodg.runs.tables import CLASS_TITLES, OVERALL_TITLES, estimate_text


def score_tables(parts: Sequence[DomainPredictions], classes: Sequence[str]) -> dict[str, Any]:
    """Returns the metrics of each domain, overall and by class, as texts for the page."""
    found = {
        part.domain: score(part.predictions, part.labels, classes, part.pixels.groups)
        for part in parts
    }
    return {
        "titles": list(OVERALL_TITLES.values()),
        "class_titles": list(CLASS_TITLES.values()),
        "rows": {
            domain: [estimate_text(s.overall.get(n), t) for n, t in OVERALL_TITLES.items()]
            for domain, s in found.items()
        },
        "classes": {
            domain: {
                name: [
                    *(estimate_text(values.get(n), t) for n, t in CLASS_TITLES.items()),
                    str(s.class_images[name]),
                ]
                for name, values in s.classes.items()
            }
            for domain, s in found.items()
        },
        "remarks": list(dict.fromkeys(s.remark() for s in found.values())),
    }
