"""What to expect on a site that nobody has seen: the mean over sites that were left out in turn."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from rich.table import Table

from solodg.runs.folder import ESTIMATE
from solodg.runs.statistics import LEVEL, mean_interval
from solodg.runs.tables import OVERALL_TITLES, percent
from solodg.storage import read_json

METRICS = ("accuracy", "macro_auc", "ece", "nll", "brier")
TITLES = tuple(OVERALL_TITLES[name] for name in METRICS)


class SiteScores(BaseModel):
    """The scores of one model on the domain that its training left out."""

    model_config = ConfigDict(extra="forbid")

    domain: str
    run: str  # folder of the model, in that of the final one
    metrics: dict[str, float]  # of the record
    protocol: str  # of the record
    steps: int  # of the selected model
    image_norm: float | str | tuple[float | str, ...] | None = None  # that the model uses
    pose: bool = False


class MeanOverSites(BaseModel):
    """The mean of a metric over sites, with half of its 95% interval by Student t."""

    model_config = ConfigDict(extra="forbid")

    mean: float
    half_interval: float | None
    sites: int  # that have this metric: one with images of a single class has no AUC


class MethodScores(BaseModel):
    """The scores of one method on each site that was left out, and their means."""

    model_config = ConfigDict(extra="forbid")

    algorithm: str
    variant: str
    sites: list[SiteScores]
    mean: dict[str, MeanOverSites]


class SiteEstimate(BaseModel):
    """What to expect on a new site, and what the final model takes over: `estimate.json`."""

    model_config = ConfigDict(extra="forbid")

    level: float = LEVEL  # of the intervals
    seed: int
    model: MethodScores
    erm: MethodScores | None  # None: the model is ERM itself
    difference: dict[str, MeanOverSites]  # of the model to ERM, site by site; empty without ERM
    steps: int  # of the final model: the median of those that the turns selected

    @property
    def domains(self) -> list[str]:
        """Returns the domains that were left out in turn."""
        return [site.domain for site in self.model.sites]

    def sentence(self) -> str:
        """Returns the mean accuracy in one sentence."""
        text = f"Expected accuracy on a new site: {_mean_text(self.model.mean, 'accuracy')}%"
        if self.erm is not None:
            text += f" (ERM {_mean_text(self.erm.mean, 'accuracy')}%)"
        return f"{text}, mean over {len(self.domains)} domains that were left out in turn."

    def remarks(self) -> list[str]:
        """Returns what the numbers are, and what they are not."""
        found = [
            f"Mean ± half of the {100 * self.level:.0f}% interval of the mean over sites (Student "
            "t), each scored by a model that was trained without it. A single new site can lie "
            "outside of the interval. The final model is trained on one site more than each model "
            "that was scored.",
        ]
        shared = [s.protocol for s in self.model.sites if "both in the sources" in s.protocol]
        if shared:
            found.append(
                f"For {len(shared)} of {len(self.domains)} sites, groups are both in the training "
                "and in the scored images: these scores are not ones of unseen groups."
            )
        return found


def method_scores(algorithm: str, variant: str, sites: Sequence[SiteScores]) -> MethodScores:
    """Returns the scores of a method with their means over sites."""
    values = {name: [s.metrics[name] for s in sites if name in s.metrics] for name in METRICS}
    return MethodScores(
        algorithm=algorithm, variant=variant, sites=list(sites), mean=_means(values)
    )


def differences(model: MethodScores, erm: MethodScores) -> dict[str, MeanOverSites]:
    """Returns the means of the differences of two methods on the same sites."""
    pairs = list(zip(model.sites, erm.sites, strict=True))
    return _means(
        {
            name: [
                ours.metrics[name] - theirs.metrics[name]
                for ours, theirs in pairs
                if name in ours.metrics and name in theirs.metrics
            ]
            for name in METRICS
        }
    )


def read_estimate(folder: Path) -> SiteEstimate | None:
    """Reads the estimate of a run; None where none was made."""
    path = folder / ESTIMATE
    return read_json(path, SiteEstimate) if path.is_file() else None


def estimate_rows(found: SiteEstimate) -> tuple[list[str], list[list[str]]]:
    """Returns the titles and the cells of a table: a row for each method and site, then means."""
    methods = {found.model.algorithm: found.model}
    if found.erm is not None:
        same = found.model.algorithm == found.erm.algorithm  # with options that ERM has not
        name = f"{found.model.algorithm}, as given" if same else found.model.algorithm
        methods = {name: found.model, found.erm.algorithm: found.erm}
    rows = [
        [site.domain, name, *(_site_cell(site.metrics, n) for n in METRICS),
         f"{site.metrics['images']:.0f}"]
        for pair in zip(*(method.sites for method in methods.values()), strict=True)
        for name, site in zip(methods, pair, strict=True)
    ]  # fmt: skip
    rows += [
        ["mean", name, *(_mean_text(method.mean, n) for n in METRICS), ""]
        for name, method in methods.items()
    ]
    if found.erm is not None:
        cells = [_mean_text(found.difference, name) for name in METRICS]
        rows.append(["mean", "difference", *cells, ""])
    return ["left out", "trained", *TITLES, "images"], rows


def estimate_table(found: SiteEstimate) -> Table:
    """Builds the table of an estimate for the terminal."""
    titles, rows = estimate_rows(found)
    table = Table(title="What to expect on a new site")
    for number, title in enumerate(titles):
        table.add_column(title, justify="left" if number < 2 else "right")
    for row in rows:
        table.add_row(*row, style="bold" if row[0] == "mean" and not row[-1] else None)
    return table


def _means(values: Mapping[str, Sequence[float]]) -> dict[str, MeanOverSites]:
    found = {name: mean_interval(each) for name, each in values.items()}
    return {
        name: MeanOverSites(mean=each.mean, half_interval=each.half, sites=each.n)
        for name, each in found.items()
        if each is not None
    }


def _site_cell(metrics: Mapping[str, float], name: str) -> str:
    if name not in metrics:
        return "-"
    return percent(metrics[name]) if _in_percent(name) else f"{metrics[name]:.3f}"


def _mean_text(means: Mapping[str, MeanOverSites], name: str) -> str:
    """Formats the mean of a metric with half of its interval, e.g. `70.2 ± 2.6`."""
    found = means.get(name)
    if found is None:
        return "-"
    scale, digits = (100, 1) if _in_percent(name) else (1, 3)
    text = f"{scale * found.mean:.{digits}f}"
    if found.half_interval is None:
        return text
    return f"{text} ± {scale * found.half_interval:.{digits}f}"


def _in_percent(name: str) -> bool:
    return OVERALL_TITLES[name].endswith("%")
