"""A random search over the settings of a method, scored on source domains that are left out.

A trial is a choice of settings. Each source domain takes the place of the target once: training
sees the others, and the validation images of this one are scored. The target is excluded, so
nothing of it is read. Trial 0 has the settings as they were given; the values of every other trial
follow from the seed and its number, so a search that was stopped goes on with the same trials.

With a test-time method its own settings are searched, and those of training stay as they are: each
held-out domain takes one training, and every trial adapts that model to its validation images.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from solodg.adapters import ADAPTERS
from solodg.algorithms import ALGORITHMS
from solodg.algorithms.ranges import LogUniform, SearchRange
from solodg.bench.cell import Cell
from solodg.bench.plan import Plan
from solodg.bench.records import Results
from solodg.bench.row import Row, for_target
from solodg.bench.table import Entry, Grid
from solodg.data import DomainDataset
from solodg.data.domains import normalise_name
from solodg.errors import UserError
from solodg.runs.config import Machine, RunConfig
from solodg.runs.defaults import is_closed_form, resolve
from solodg.runs.opened_data import load_dataset, loading_of
from solodg.runs.stream import Stream
from solodg.runs.tables import mean_accuracy, percent
from solodg.seeding import numpy_generator

LEAST_DOMAINS = 3  # of the sources: one is held out, two are trained on
RATES = ("learning_rate", "backbone_learning_rate")
_RATE_FACTOR = 10.0  # a rate is searched up to so many times below and above its default
_OF_PLAN = ("dataset", "targets", "exclude", "seed")  # what a search sets itself


@dataclass(frozen=True)
class Trial:
    """The settings of one trial; empty in trial 0.

    They are rates and arguments of the algorithm, or arguments of the adapter that is searched.
    """

    number: int
    rates: dict[str, float]
    arguments: dict[str, Any]

    def settings(self) -> dict[str, Any]:
        """Returns the fields of a configuration that the trial sets."""
        return self.rates | ({"arguments": self.arguments} if self.arguments else {})

    def options(self) -> str:
        """Returns the settings as options of `solodg train`."""
        words = [f"--{name.replace('_', '-')} {value}" for name, value in self.rates.items()]
        return " ".join([*words, *(f"--set {n}={v}" for n, v in self.arguments.items())])


@dataclass(frozen=True)
class Outcome:
    """The accuracies of a trial on the domains that were held out; it is complete with all."""

    trial: Trial
    accuracies: Mapping[str, float]

    @property
    def mean(self) -> float:
        """Returns the mean accuracy over the held-out domains."""
        return sum(self.accuracies.values()) / len(self.accuracies)


class Search:
    """A search for one method and one set of targets.

    `config` is as given, before `resolve`: what it sets is not searched. `name` is that of its
    files, `runs` the number of models that it may score, `data` the dataset if it is loaded. With
    an `adapter` its arguments are searched, all but those that `stream` sets.
    """

    def __init__(
        self,
        name: str,
        config: RunConfig,
        machine: Machine,
        runs: int,
        data: DomainDataset | None = None,
        adapter: str = "none",
        stream: Stream | None = None,
    ) -> None:
        self.name, self.config, self.adapter, self.stream = name, config, adapter, stream
        self.resolved = resolve(config)
        dataset = load_dataset(self.resolved, machine) if data is None else data
        self.targets = dataset.canonical(self.resolved.targets)
        excluded = (*self.targets, *dataset.canonical(config.exclude or ()))
        self.excluded = tuple(dict.fromkeys(excluded))
        self.sources = [n for n in dataset.domain_names if n not in self.excluded]
        self.ranges = self._ranges()
        self._check(runs)
        self.trials = [self._draw(number) for number in range(runs // len(self.sources))]

    def _ranges(self) -> dict[str, SearchRange]:
        """Returns what is searched: the rates and arguments that are not given."""
        if self.adapter != "none":
            set_by_stream = self.stream.arguments if self.stream else {}
            found = ADAPTERS[self.adapter].search.items()
            return {n: values for n, values in found if n not in set_by_stream}
        given = {n for n, value in self.config if value is not None and n in RATES}
        kind = ALGORITHMS[self.config.algorithm]
        fixed = {*self.config.arguments, *kind.variants[self.config.variant]}
        ranges: dict[str, SearchRange] = {}
        if not is_closed_form(self.resolved):
            for name in RATES[:1] if self.config.freeze_backbone else RATES:
                if name not in given:
                    middle = getattr(self.resolved, name)
                    ranges[name] = LogUniform(middle / _RATE_FACTOR, middle * _RATE_FACTOR)
        return ranges | {n: found for n, found in kind.search.items() if n not in fixed}

    def _check(self, runs: int) -> None:
        config = self.config
        if config.pseudo_domains:
            raise UserError(
                "--pseudo-domains are no evidence of another domain: settings cannot be chosen on "
                "them. Give data with at least three source domains."
            )
        if config.devices != "1" or config.num_nodes > 1:
            raise UserError(
                "each trial trains on one device: leave out --devices and --num-nodes. --on ray "
                "runs many at a time."
            )
        if len(self.sources) < LEAST_DOMAINS:
            raise UserError(
                f"settings are chosen by leaving each source domain out: at least {LEAST_DOMAINS} "
                f"are needed, and there {'is' if len(self.sources) == 1 else 'are'} "
                f"{len(self.sources)} ({', '.join(self.sources)})."
            )
        if not self.ranges:
            raise UserError(
                f"nothing is left to search: {self.method} has no other main setting than "
                "those that are given, if any."
            )
        if runs < 2 * len(self.sources):
            raise UserError(
                f"--runs {runs}: a trial takes {len(self.sources)} runs, one for each source "
                f"domain that is left out. Give at least {2 * len(self.sources)}: the first trial "
                "has the settings as they are."
            )

    def _draw(self, number: int) -> Trial:
        if number == 0:
            return Trial(0, {}, {})
        drawn = {
            name: found.draw(
                numpy_generator(self.config.seed, "search", number, name), self.resolved.steps
            )
            for name, found in self.ranges.items()
        }
        rates = {name: float(drawn.pop(name)) for name in RATES if name in drawn}
        return Trial(number, rates, drawn)

    @cached_property
    def _plan(self) -> Plan:
        """Returns the plan of all trials: a row for each, a target for each source domain."""
        given = self.config.model_dump(exclude_unset=True, exclude=set(_OF_PLAN))
        return Plan(
            name=self.name,
            title=self.title(),
            dataset=self.config.dataset,
            targets=[[source] for source in self.sources],
            seeds=[self.config.seed],
            run=given | {"exclude": self.excluded or None, "score_on": "validation"},
            rows=[self._row(trial) for trial in self.trials],
        )

    def _row(self, trial: Trial) -> Row:
        name = f"trial {trial.number}"
        if self.adapter == "none":
            return Row(name=name, run=trial.settings())
        given = self.stream.model_dump(exclude_unset=True) if self.stream else {}
        arguments = given.get("arguments", {}) | trial.arguments
        stream = Stream(**given | {"arguments": arguments})
        return Row(name=name, adapter=self.adapter, stream=stream)

    def cells(self) -> list[Cell]:
        """Returns the cells of all trials, trial by trial."""
        place = {row.name: number for number, row in enumerate(self._plan.rows)}
        return sorted(self._plan.cells(), key=lambda cell: place[cell.row])

    def outcomes(self, results: Results) -> list[Outcome]:
        """Returns the accuracies of every trial that is complete."""
        found: dict[str, dict[str, float]] = {}
        for cell in self.cells():
            accuracy = mean_accuracy(results.done.get(cell.key, []), "target")
            if accuracy is not None:
                found.setdefault(cell.row, {})[cell.config.targets[0]] = accuracy
        named = [(trial, found.get(f"trial {trial.number}", {})) for trial in self.trials]
        return [Outcome(t, each) for t, each in named if len(each) == len(self.sources)]

    @property
    def method(self) -> str:
        """Returns the name of the method whose settings are searched."""
        return self.config.algorithm if self.adapter == "none" else self.adapter

    def title(self) -> str:
        """Returns what is searched, for a table."""
        config = self.config
        without = f", without {', '.join(self.excluded)}" if self.excluded else ""
        adapted = "" if self.adapter == "none" else f" + {self.adapter}"
        return f"{config.algorithm} ({config.variant}){adapted} on {self.resolved.dataset}{without}"

    def table(self, outcomes: Sequence[Outcome]) -> Grid:
        """Builds the table of trials: settings, accuracy on each held-out domain, and the mean."""
        chosen = best(outcomes)
        header = ["trial", *self.ranges, *(f"held out: {s}" for s in self.sources), "mean"]
        rows = []
        for outcome in outcomes:
            values = outcome.trial.rates | outcome.trial.arguments
            texts = [str(values[n]) if n in values else "as given" for n in self.ranges]
            texts += [percent(outcome.accuracies[s]) for s in self.sources]
            texts = [str(outcome.trial.number), *texts, percent(outcome.mean)]
            rows.append([Entry(text, best=outcome is chosen) for text in texts])
        missing = len(self.trials) - len(outcomes)
        notes = [f"{missing} of {len(self.trials)} trials are not complete."] if missing else []
        return Grid(self.title(), header, rows, notes)


def best(outcomes: Sequence[Outcome]) -> Outcome:
    """Returns the outcome with the highest mean; of equal ones the first."""
    return max(outcomes, key=lambda outcome: (outcome.mean, -outcome.trial.number))


def row_with(row: Row, search: Search, trial: Trial) -> Row:
    """Returns a row of a plan with the settings of a trial, for the targets of the search alone.

    Without targets they are the row's.
    """
    if search.adapter != "none":
        return _with_adapter(row, search, trial)
    settings = trial.settings()
    if not search.targets:
        return row.model_copy(update={"run": _merged(row.run, settings)})
    target = search.targets[0]
    before = for_target(row.by_target, search.targets)
    # A target's arguments take the place of the row's.
    own = {"arguments": row.run["arguments"]} if row.run.get("arguments") else {}
    chosen = {target: _merged(own | before, settings)}
    return row.model_copy(update={"by_target": row.by_target | chosen})


def _with_adapter(row: Row, search: Search, trial: Trial) -> Row:
    if not search.targets:
        stream = row.stream or Stream()
        stream = stream.model_copy(update={"arguments": stream.arguments | trial.arguments})
        return row.model_copy(update={"stream": stream})
    before = for_target(row.adapter_by_target, search.targets)
    chosen = {search.targets[0]: before | trial.arguments}
    return row.model_copy(update={"adapter_by_target": row.adapter_by_target | chosen})


def _merged(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    arguments = {**(values.get("arguments") or {}), **more.get("arguments", {})}
    return values | more | ({"arguments": arguments} if arguments else {})


def searches_of(plan: Plan, machine: Machine, runs: int) -> list[tuple[Row, Search]]:
    """Returns a search for each row and each set of targets of a plan, with its first seed.

    A row with an adapter has the settings of its adapter searched, and no others.
    """
    plan.cells()  # which raises an error for settings that do not fit
    found, loaded = [], {}
    for row in plan.rows:
        for targets in plan.target_sets():
            values = plan.given(row, targets, plan.seeds[0])
            place = "-".join(normalise_name(t) for t in targets)
            name = f"{plan.name}-{normalise_name(row.name)}-{place}"[:150]
            config = RunConfig(**values)
            key = str(loading_of(resolve(config), machine))
            if key not in loaded:
                loaded[key] = load_dataset(resolve(config), machine)
            stream = plan.stream_of(row, targets)
            search = Search(name, config, machine, runs, loaded[key], row.adapter, stream)
            found.append((row, search))
    return found
