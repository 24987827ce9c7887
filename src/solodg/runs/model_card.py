"""The model card of a run: `README.md` in its folder, written from its other files alone.

Its head is metadata that the Hugging Face Hub reads.
"""

from collections.abc import Sequence
from pathlib import Path

from solodg.readings import readings_of
from solodg.runs import checkpoint
from solodg.runs.averaged_runs import read_averaged
from solodg.runs.card_metadata import metadata_text
from solodg.runs.config import ResolvedConfig
from solodg.runs.defaults import is_closed_form
from solodg.runs.evidence import Evidence
from solodg.runs.folder import CARD, RESULTS, read_config, read_evidence, read_origin, read_versions
from solodg.runs.model_info import ModelInfo
from solodg.runs.novelty import load_novelty
from solodg.runs.recorded_scores import RecordedScores, read_recorded
from solodg.runs.scores import Estimate
from solodg.runs.settings_text import method_text, settings_text, weights_text
from solodg.runs.site_estimate import SiteEstimate, estimate_rows, read_estimate
from solodg.runs.statistics import LEVEL
from solodg.runs.tables import OVERALL_TITLES, ROLES, UNSEEN, estimate_text
from solodg.runs.temperature import load_temperature
from solodg.storage import write_atomically

_MOST_NAMES = 50  # of classes or domains that a card lists

_USE = """\
`RUN` is {what}.

```bash
solodg predict RUN IMAGE
solodg evaluate RUN --on SITE     # labelled images of a new site
solodg export RUN --onnx model.onnx
solodg serve RUN
```

```python
import solodg

model = solodg.load("{name}")
print(model.predict("IMAGE").label)
```"""


def write_card(folder: Path) -> Path:
    """Writes the model card of a run whose training has ended; returns its path."""
    path = folder / CARD
    write_atomically(path, card_text(folder).encode())
    return path


def card_text(folder: Path, *, hub_name: str | None = None, licence: str | None = None) -> str:
    """Returns the model card of a run as Markdown, with metadata as its head.

    `hub_name` is the name of the run on the Hub, if it is written for it, and `licence` the one
    under which the model is published there.
    """
    config, info = read_config(folder), checkpoint.load_info(folder)
    estimate, scores = read_estimate(folder), read_recorded(folder / RESULTS)
    use = {"what": "the path of this folder", "name": "RUN"}
    if hub_name is not None:
        use = {"what": f"`{hub_name}` (`pip install 'solodg[hub]'`)", "name": hub_name}
    sections = {
        "": _summary(config, info),
        "Data": _data(folder, config, info),
        "Preprocessing": _preprocessing(info),
        "Training": _training(folder, config, info, estimate),
        "What adapts to each image": _adaptation(folder, info),
        "Scores": _scores(folder, config, estimate, scores),
        "When not to answer": _trust(folder),
        "Limits": _limits(config, info, estimate, scores),
        "Licence": _licence(licence),
        "Use": _USE.format(**use),
        "Versions": ", ".join(f"{n} {v}" for n, v in read_versions(folder).items()) + ".",
    }
    head = metadata_text(config, info, scores, estimate, licence)
    title = f"# {config.algorithm} on {info.dataset}"
    parts = [f"## {name}\n\n{text}" if name else text for name, text in sections.items()]
    return head + "\n" + "\n\n".join([title, *parts]) + "\n"


def _summary(config: ResolvedConfig, info: ModelInfo) -> str:
    return (
        f"An image classifier of {len(info.classes)} classes: algorithm {config.algorithm}, "
        f"backbone {config.backbone}, {_trained_on(config, info)}."
    )


def _trained_on(config: ResolvedConfig, info: ModelInfo) -> str:
    """Says in a clause whether a domain was left out of training."""
    if config.pseudo_domains:
        made = f"{len(info.source_domains)} domains that were made of them ({config.pseudo_domains}"
        trained = f"trained on images in {made} pseudo-domains)"
    else:
        trained = f"trained on {len(info.source_domains)} domains"
    if not config.left_out:
        return f"{trained}, all that the data has"
    return f"{trained}, without {', '.join(config.left_out)}"


def _data(folder: Path, config: ResolvedConfig, info: ModelInfo) -> str:
    origin = read_origin(folder)
    images = {name: f" ({each.images} images)" for name, each in origin.domains.items()}
    trained = [f"{name}{images[name]}" for name in images] or info.source_domains
    rows = {
        "dataset": info.dataset,
        "trained and validated on": _listed(trained),
        "left out (targets)": _listed(config.targets) if config.targets else "none",
        "neither trained on nor scored": _listed(config.exclude or ()),
        "classes": _listed(info.classes),
        "fingerprint of the source images": f"`{origin.fingerprint}`",
    }
    return _bullets(rows)


def _preprocessing(info: ModelInfo) -> str:
    window = info.window and f"{info.window[0]:g} becomes black and {info.window[1]:g} white"
    return _bullets(
        {
            "size": f"resized to a square of {info.image_size} pixels, without cropping",
            "channels": "1 (grey)" if info.channels == 1 else "3 (colour)",
            "window of pixel values": window or "",
        }
    )


def _training(
    folder: Path, config: ResolvedConfig, info: ModelInfo, estimate: SiteEstimate | None
) -> str:
    averaged = read_averaged(folder)
    steps = "solved in closed form, without steps"
    if averaged:
        steps = f"{checkpoint.selected_steps(checkpoint.selection(folder))} ({averaged.selection})"
    elif not is_closed_form(config):
        how = "selected by source validation"
        if estimate:
            how = "the median of the steps that were selected with each domain left out in turn"
        elif config.select:
            how = "selected by leaving one source domain out in turn"
        steps = (
            f"{checkpoint.selected_steps(checkpoint.selection(folder))} of {config.steps}, {how}"
        )
    frozen = ", frozen" if config.freeze_backbone else ""
    return _bullets(
        {
            "algorithm": method_text(config),
            "backbone": f"{config.backbone}, from {weights_text(config)}{frozen}",
            "steps": steps,
            "averaged runs, best first": "; ".join(map(str, averaged.runs)) if averaged else "",
            "left out of the average": "; ".join(map(str, averaged.left_out)) if averaged else "",
            "settings" + " of the best run" * bool(averaged): settings_text(config, info),
            "seed": str(config.seed),
        }
    )


def _adaptation(folder: Path, info: ModelInfo) -> str:
    readings = ", ".join(map(str, readings_of(info.image_norm or None)))
    found = read_evidence(folder)
    evidence = Evidence.model_validate(found) if found else None
    why = {part.part: part.why for part in evidence.parts} if evidence else {}
    lines = _bullets(
        {
            name: f"{value}, {why[name]}" if name in why else f"{value}, by the configuration"
            for name, value in {
                "image norm": f"on ({readings})" if readings else "off",
                "pose": "on" if info.pose else "off",
            }.items()
        }
    )
    return lines + (f"\n\nEvidence: {evidence.rests_on}." if evidence else "")


def _scores(
    folder: Path,
    config: ResolvedConfig,
    estimate: SiteEstimate | None,
    scores: Sequence[RecordedScores],
) -> str:
    validation = checkpoint.selection(folder)["validation"]
    texts = [
        f"Source validation: accuracy {100 * validation['accuracy']:.1f}%, NLL "
        f"{validation['nll']:.3f}. These images are of domains that the model was trained on.",
    ]
    if scores:
        texts += [_score_table(scores), _intervals(scores)]
    elif config.targets:
        texts.append(
            f"Unseen domains: `solodg evaluate RUN` scores {_listed(config.targets)}, and adds the "
            "records to `results.jsonl`."
        )
    if estimate is None:
        texts.append("Estimate for a new site: none was made.")
    else:
        titles, rows = estimate_rows(estimate)
        texts += [estimate.sentence(), _table(titles, rows)]
        texts += estimate.remarks()
    return "\n\n".join(texts)


def _score_table(scores: Sequence[RecordedScores]) -> str:
    rows = [
        [
            each.domain,
            ROLES[each.role],
            each.protocol,
            *(
                estimate_text(_estimate(each, name), title)
                for name, title in OVERALL_TITLES.items()
            ),
            str(each.images),
        ]
        for each in scores
    ]
    return _table(["domain", "", "protocol", *OVERALL_TITLES.values(), "images"], rows)


def _estimate(found: RecordedScores, name: str) -> Estimate | None:
    value = found.overall.get(name)
    return None if value is None else Estimate(value.value, value.low, value.high)


def _intervals(scores: Sequence[RecordedScores]) -> str:
    units = " or ".join(sorted({each.resampled for each in scores if each.resampled}))
    if not units:
        return "Scores of an earlier version, without intervals."
    return (
        f"In brackets: {100 * LEVEL:.0f}% intervals, by bootstrap samples of {units}. They do not "
        "cover how a new site differs from these."
    )


def _licence(licence: str | None) -> str:
    if licence is None:
        return (
            "None is stated for these weights: ask whoever trained them, and mind the licences of "
            "the images and of pretrained weights. The code of solodg is under the MIT licence."
        )
    return f"The weights: {licence}. The code of solodg is under the MIT licence."


def _trust(folder: Path) -> str:
    """Says what the novelty of an image means, and what temperature was fitted."""
    novelty, temperature = load_novelty(folder), load_temperature(folder)
    return _bullets(
        {
            "novelty": f"0 to 1; {novelty.basis}" if novelty else "none was computed",
            "temperature": temperature.sentence() if temperature else "none was fitted",
        }
    )


def _limits(
    config: ResolvedConfig,
    info: ModelInfo,
    estimate: SiteEstimate | None,
    scores: Sequence[RecordedScores],
) -> str:
    """Returns what the model must not be used for, as far as the run shows it."""
    found = [
        f"It gives one of its {len(info.classes)} classes to every image, also to images of "
        "something else.",
        "Images that differ from the training images in a way in which the training domains do not "
        "differ among themselves were not part of any choice or score here.",
    ]
    if info.pose:
        found.append("It undoes rotations: do not use it where orientation tells classes apart.")
    if config.pseudo_domains:
        found.append("Its domains were made from the images: they are no evidence of a new domain.")
    if config.allow_shared_groups:
        found.append("Groups may be both in the training images and in scored ones.")
    unseen = [each for each in scores if each.role in UNSEEN]
    if estimate is None and not config.targets and not unseen:
        found.append(
            "Nothing estimates its accuracy on a new site: score labelled images of that site "
            "first, with `solodg evaluate RUN --on SITE`."
        )
    return "\n".join(f"- {text}" for text in found)


def _bullets(rows: dict[str, str]) -> str:
    """Returns a list of names and texts; an empty text is left out."""
    return "\n".join(f"- {name}: {text}" for name, text in rows.items() if text)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(_cell(text) for text in line)} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
