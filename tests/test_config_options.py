"""Options of the command line: derived from the configuration, which declares each of them once."""

import inspect
from pathlib import Path
from typing import get_args

import pytest
import typer

from solodg import SoloClassifier
from solodg.algorithms import ALGORITHMS
from solodg.bench.plan import Plan
from solodg.cli import app
from solodg.cli.bench import bench
from solodg.cli.config_options import options_of, validated
from solodg.cli.evaluate import evaluate
from solodg.cli.serve import serve
from solodg.cli.train import config_of, train
from solodg.errors import UserError
from solodg.runs.config import Machine, ResolvedConfig, RunConfig
from solodg.runs.defaults import resolve
from solodg.runs.presets import PRESETS
from solodg.runs.stream import Stream
from solodg.serving.settings import ServerSettings


def declaration(parameter: inspect.Parameter) -> tuple[object, typer.models.OptionInfo]:
    kind, info = get_args(parameter.annotation)
    return kind, info


def test_every_field_is_an_option_of_train_except_what_only_plans_set() -> None:
    options = set(inspect.signature(train).parameters)
    fields = set(RunConfig.model_fields) | set(Machine.model_fields)
    assert fields - options == {"score_on"}
    assert options - fields == {"output", "preset", "resume", "estimate", "quiet"}


def test_bench_shares_options_of_the_machine_with_train() -> None:
    own, others = inspect.signature(bench).parameters, inspect.signature(train).parameters
    shared = {"data_dir", "cache_dir", "download", "accelerator"}
    assert shared <= own.keys()
    for name in shared:
        assert declaration(own[name])[1].help == declaration(others[name])[1].help


def test_evaluate_shares_options_with_train() -> None:
    own, others = inspect.signature(evaluate).parameters, inspect.signature(train).parameters
    for name in ("accelerator", "skip_bad_images"):
        assert declaration(own[name])[1].help == declaration(others[name])[1].help


@pytest.mark.parametrize(
    ("name", "kind", "flags"),
    [
        ("targets", list[str] | None, ["--target"]),
        ("arguments", list[str] | None, ["--set"]),
        ("freeze_norm", bool | None, ["--freeze-norm", "--train-norm"]),
        ("pretrained", bool | None, ["--pretrained"]),
        ("channels", int | None, ["--channels"]),
        ("weight_average", str | None, ["--weight-average"]),
        ("linear_steps", int | None, ["--linear-steps"]),
        ("decay", str | None, ["--decay"]),
        ("image_norm", str | None, ["--image-norm"]),
        ("backbone_learning_rate", float | None, ["--backbone-learning-rate"]),
    ],
)
def test_an_option_has_the_type_and_the_spelling_of_its_field(name, kind, flags) -> None:
    (parameter,) = options_of(RunConfig, name)
    assert declaration(parameter)[0] == kind
    command = typer.main.get_command(app).commands["train"]
    (option,) = (p for p in command.params if p.name == name)
    assert [*option.opts, *option.secondary_opts] == flags
    assert option.default is None


def test_help_ends_with_the_default_of_the_field() -> None:
    options = {p.name: declaration(p)[1].help for p in options_of(RunConfig)[1:]}
    assert options["batch_size"].endswith("default: 32[/dim]")
    assert options["seed"].endswith("default: 0[/dim]")
    assert options["steps"].endswith(
        "default: 2000; 600 with a frozen backbone; none for ridge[/dim]"
    )
    assert "default" not in options["pretrained"]


def test_options_that_were_not_given_take_their_defaults() -> None:
    machine = validated(Machine, {"workers": 3, "download": None, "steps": 7, "cache_dir": None})
    assert machine == Machine(workers=3)
    assert validated(RunConfig, {"dataset": "toy", "targets": []}) == RunConfig(dataset="toy")


def test_the_error_for_a_wrong_value_names_its_option() -> None:
    with pytest.raises(UserError, match=r"^--num-nodes 0: input should be greater than 0\.$"):
        validated(RunConfig, {"dataset": "toy", "num_nodes": 0})
    with pytest.raises(UserError, match=r"^--target "):
        validated(RunConfig, {"dataset": "toy", "targets": 3})
    with pytest.raises(UserError, match=r"^--stream 'both': "):
        validated(Stream, {"domains": "both"})


def test_a_resolved_configuration_has_the_fields_of_an_open_one_in_the_same_order() -> None:
    assert list(ResolvedConfig.model_fields) == list(RunConfig.model_fields)
    resolved = resolve(RunConfig(dataset="toy", algorithm="erm"))
    assert list(resolved.model_dump()) == list(RunConfig.model_fields)


def test_a_resolved_configuration_survives_json_and_leaves_nothing_open(tmp_path: Path) -> None:
    resolved = resolve(RunConfig(dataset="toy", image_norm=(0, 300)))
    again = ResolvedConfig.model_validate_json(resolved.model_dump_json())
    assert again == resolved
    assert resolve(again) is again
    needed = ("steps", "image_size", "channels", "freeze_norm", "learning_rate", "validate_every")
    assert all(getattr(resolved, name) is not None for name in needed)


def test_there_is_one_default_algorithm_and_solo_has_its_variants_and_presets() -> None:
    assert RunConfig(dataset="toy").algorithm == SoloClassifier().algorithm == "solo_plus"
    plan = Plan(
        name="p", title="t", dataset="toy", targets=["sky"], seeds=[0], rows=[{"name": "a"}]
    )
    assert plan.cells()[0].config.algorithm == "solo_plus"
    for kind in ("solo_plus", "solo", "solo_code"):
        for variant in ALGORITHMS[kind].variants:
            found = RunConfig(dataset="toy", variant=variant).algorithm
            assert found == ("solo_plus" if variant == "default" else kind)
            assert RunConfig(dataset="toy", variant=variant, algorithm="erm").algorithm == "erm"

    def by_command(preset: str | None = None, **options: str) -> tuple[str, str]:
        given = dict.fromkeys(("algorithm", "variant", "arguments"))
        config = config_of(given | {"dataset": "toy"} | options, preset)
        return config.algorithm, config.variant

    assert by_command() == ("solo_plus", "default")
    assert by_command(variant="invariant") == ("solo", "invariant")
    assert by_command("literal") == ("solo", "literal")
    assert by_command("literal", variant="invariant") == ("solo", "invariant")
    assert by_command("literal", algorithm="solo") == ("solo", "literal")
    assert by_command("literal", algorithm="erm") == ("erm", "default")
    shown = RunConfig.model_fields["algorithm"].json_schema_extra
    assert shown["shown_default"] == "solo_plus; solo with its presets and variants"


def test_the_literal_preset_drops_the_learning_rate_as_the_authors_do() -> None:
    config = resolve(validated(RunConfig, {"dataset": "toy"} | PRESETS["literal"]))
    assert config.decay == "step"
    assert not config.label_smoothing
    assert not config.image_norm


def test_the_defaults_in_the_help_are_those_that_resolve_chooses() -> None:
    def shown(field: str) -> str:
        extra = RunConfig.model_fields[field].json_schema_extra
        assert isinstance(extra, dict)
        return str(extra["shown_default"])

    scratch = resolve(RunConfig(dataset="toy"))
    tuned = resolve(RunConfig(dataset="toy", pretrained=True))
    frozen = resolve(
        RunConfig(dataset="toy", pretrained=True, freeze_backbone=True, algorithm="erm")
    )
    steps = f"{scratch.steps}; {frozen.steps} with a frozen backbone; none for ridge"
    assert shown("steps") == steps
    rates = f"{tuned.learning_rate} when fine-tuning given weights, else {scratch.learning_rate}"
    assert shown("learning_rate") == rates
    assert frozen.learning_rate == scratch.learning_rate
    for config, rate in ((tuned, 0.00005), (scratch, 0.001)):
        assert config.backbone_learning_rate == rate
    assert shown("backbone_learning_rate") == "0.00005 when weights are given, else 0.001"
    assert shown("label_smoothing") == f"{scratch.label_smoothing} from random weights"
    assert shown("decay") == f"{scratch.decay} from random weights"
    assert (tuned.label_smoothing, tuned.decay) == (None, None)
    assert shown("validate_every") == "a fifth of the steps, at most 200"
    assert (scratch.validate_every, frozen.validate_every) == (200, 600 // 5)


def test_the_limits_of_serve_are_those_of_the_server() -> None:
    given = inspect.signature(serve).parameters
    settings = ServerSettings()
    for name in ("max_batch", "max_images", "max_pixels", "decode_pixels", "queue"):
        assert given[name].default == getattr(settings, name)
    assert given["max_mb"].default * 1024**2 == settings.max_bytes
    assert given["queue_mb"].default * 1024**2 == settings.queue_bytes
    assert given["timeout"].default == settings.seconds
