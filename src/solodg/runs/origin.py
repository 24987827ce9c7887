"""What a run is trained from: source images and initial weights, compared when it resumes."""

import hashlib

from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from solodg.data import SourceData
from solodg.data.images import digest


class DomainOrigin(BaseModel):
    """The images of one source domain."""

    model_config = ConfigDict(extra="forbid")

    images: int
    fingerprint: str  # changes with an image, its class, or its part: training, validation, test


class Origin(BaseModel):
    """The source images of a run and the weights that its backbone starts from: `source.json`."""

    model_config = ConfigDict(extra="forbid")

    fingerprint: str  # of the `SourceData`
    domains: dict[str, DomainOrigin] = Field(default_factory=dict)  # empty in runs of before
    weights: str | None = None  # hash of given or published weights; None: random ones

    def differences(self, now: "Origin") -> list[str]:
        """Returns what has changed since, each as a clause; an empty list if nothing has."""
        found = []
        if self.domains:
            for name in {**self.domains, **now.domains}:
                text = _difference(self.domains.get(name), now.domains.get(name))
                if text:
                    found.append(f"source domain {name!r} {text}")
        if not found and self.fingerprint != now.fingerprint:
            what = "are in another order" if self.domains else "or their split are others"
            found.append(f"the source images {what}")
        if self.weights and self.weights != now.weights:
            found.append(
                f"the initial weights of the backbone are others ({self.weights} -> {now.weights})"
            )
        return found


def describe_origin(source: SourceData, weights: nn.Module | None) -> Origin:
    """Describes source images and, unless they are random (None), the initial weights."""
    lines: dict[str, list[str]] = {name: [] for name in source.domain_names}
    for part_name, part in (("train", source.train), ("val", source.val), ("test", source.test)):
        for key, label, domain in zip(part.images.keys(), part.labels, part.domains, strict=True):
            name = source.domain_names[domain]
            lines[name].append(f"{part_name}\t{source.classes[label]}\t{key}")
    return Origin(
        fingerprint=source.fingerprint(),
        domains={
            name: DomainOrigin(
                images=len(each), fingerprint=digest("\n".join(sorted(each)).encode())
            )
            for name, each in lines.items()
        },
        weights=None if weights is None else _hash_of_weights(weights),
    )


def _difference(before: DomainOrigin | None, now: DomainOrigin | None) -> str:
    """Returns how a domain has changed; an empty string if it has not."""
    if before is None:
        return "is new"
    if now is None:
        return "is gone"
    if before.images != now.images:
        return f"had {before.images} images and has {now.images}"
    return "" if before == now else "has other images, classes or a different split"


def _hash_of_weights(module: nn.Module) -> str:
    content = hashlib.blake2b(digest_size=8)
    for name, tensor in module.state_dict().items():
        content.update(name.encode())
        content.update(tensor.cpu().contiguous().numpy().tobytes())
    return content.hexdigest()
