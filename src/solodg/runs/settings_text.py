"""The method and the settings of a run in words, for reports and model cards."""

from pathlib import Path

from solodg.readings import readings_of
from solodg.runs.config import ResolvedConfig
from solodg.runs.defaults import default_arguments
from solodg.runs.model_info import ModelInfo


def method_text(config: ResolvedConfig) -> str:
    """Returns the algorithm with its variant and the arguments that are not its defaults."""
    usual = default_arguments(config.algorithm, config.variant)
    changed = {k: v for k, v in config.arguments.items() if k not in usual or usual[k] != v}
    options = ", ".join(f"{name}={value}" for name, value in changed.items())
    return f"{config.algorithm} ({config.variant})" + (f", {options}" if options else "")


def settings_text(config: ResolvedConfig, info: ModelInfo) -> str:
    """Lists the settings of training that a result may depend on."""
    words = [weights_text(config)]
    if info.image_norm:
        words.append(f"image norm {', '.join(map(str, readings_of(info.image_norm)))}")
    if info.pose:
        words.append("pose")
    words.append(f"learning rate {config.learning_rate:g}")
    if not config.freeze_backbone:
        words.append(f"of the backbone {config.backbone_learning_rate:g}")
    if config.linear_steps:
        words.append(f"{config.linear_steps} linear steps")
    words.append(f"{config.decay or 'constant'} decay")
    words.append(f"label smoothing {config.label_smoothing or 0:g}")
    if config.weight_average:
        words.append(f"weight average {config.weight_average}")
    words.append(f"weight decay {config.weight_decay:g}")
    words.append(f"{config.batch_size} queries, {config.context_images} context images")
    words.append(_augmentation(config))
    return ", ".join(words)


def weights_text(config: ResolvedConfig) -> str:
    """Returns what weights the backbone starts from: "random weights", or those of a file."""
    start = config.weights or ("published" if config.pretrained else "random")
    return f"{Path(start).name} weights"


def _augmentation(config: ResolvedConfig) -> str:
    """Returns how training images are augmented."""
    if not config.augment or config.freeze_backbone or config.stored_views == 0:
        return "not augmented"
    copies = f", {config.stored_views} stored copies of each image" if config.stored_views else ""
    return f"augmented{copies}"
