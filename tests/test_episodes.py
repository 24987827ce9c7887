"""Episodes: what a sampler may and may not draw, for any data."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solodg.data.domains import DomainDataset
from solodg.data.episodes import EpisodeLoader, EpisodeSampler
from solodg.data.images import ImageArray
from solodg.data.labelled_images import LabelledImages
from solodg.data.splits import TEST, TRAIN, UNASSIGNED, VAL
from solodg.errors import UserError
from solodg.types import Episode


def labelled(labels: np.ndarray, domains: np.ndarray, num_domains: int) -> LabelledImages:
    import torch

    identity = torch.arange(len(labels))[:, None].float()  # an image is its own number
    names = tuple(f"d{i}" for i in range(num_domains))
    return LabelledImages(ImageArray(identity), labels, domains, names)


@st.composite
def layouts(draw: st.DrawFn):
    """Domains and classes with at least `context` images where they have any."""
    num_domains, num_classes = draw(st.integers(2, 4)), draw(st.integers(1, 4))
    context = draw(st.integers(1, 3))
    counts = draw(
        st.lists(
            st.one_of(st.just(0), st.integers(context, context + 5)),
            min_size=num_domains * num_classes,
            max_size=num_domains * num_classes,
        )
    )
    table = np.array(counts).reshape(num_domains, num_classes)
    table[:, 0] = np.maximum(table[:, 0], context)  # no domain is empty
    domains = np.repeat(np.arange(num_domains), table.sum(1))
    labels = np.concatenate([np.repeat(np.arange(num_classes), row) for row in table])
    return labelled(labels, domains, num_domains), context, draw(st.integers(1, 8))


@settings(deadline=None, max_examples=60)
@given(layouts(), st.integers(0, 1000), st.integers(0, 50))
def test_an_episode_is_what_it_says(layout, seed: int, step: int) -> None:
    data, context, queries = layout
    drawn = EpisodeSampler(data, context=context, queries=queries, seed=seed)(step)
    meta_target = set(data.domains[drawn.target].tolist())
    meta_source = set(data.domains[drawn.source].tolist())
    assert len(meta_target) == 1
    assert meta_source == set(data.domains.tolist()) - meta_target
    contexts = np.concatenate([drawn.source, drawn.target[: drawn.num_context]])
    assert len(set(contexts.tolist())) == len(contexts)  # no image twice
    cells = list(zip(data.domains[contexts].tolist(), data.labels[contexts].tolist(), strict=True))
    wanted = set(zip(data.domains.tolist(), data.labels.tolist(), strict=True))
    assert {cell: cells.count(cell) for cell in wanted} == dict.fromkeys(wanted, context)
    asked = drawn.target[drawn.num_context :]
    assert 1 <= len(asked) <= queries
    assert set(data.labels[asked].tolist()) <= set(data.labels[drawn.source].tolist())
    known = np.isin(data.labels, data.labels[drawn.source])
    inside = np.flatnonzero((data.domains == next(iter(meta_target))) & known)
    if len(set(inside.tolist()) - set(contexts.tolist())):
        assert not set(asked.tolist()) & set(contexts.tolist())


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_no_target_image_and_no_held_out_image_is_ever_drawn(data) -> None:
    """Through the real path: leave_out, then episodes; an image carries its own number."""
    import torch

    num_domains, num_classes = data.draw(st.integers(3, 4)), data.draw(st.integers(1, 3))
    per_cell = data.draw(st.integers(4, 8))
    count = num_domains * num_classes * per_cell
    domains = np.repeat(np.arange(num_domains), num_classes * per_cell)
    labels = np.tile(np.repeat(np.arange(num_classes), per_cell), num_domains)
    parts = data.draw(st.sampled_from([[UNASSIGNED], [TRAIN, TRAIN, VAL, TEST]]))
    split = np.array([parts[i % len(parts)] for i in range(count)])
    grouped = data.draw(st.booleans())
    dataset = DomainDataset(
        name="numbers",
        images=ImageArray(torch.arange(count)[:, None].float()),
        labels=labels,
        domains=domains,
        classes=tuple(f"c{i}" for i in range(num_classes)),
        domain_names=tuple(f"d{i}" for i in range(num_domains)),
        split=split,
        protocol="random-split",
        groups=np.arange(count) // 2 if grouped else None,
    )
    target = data.draw(st.integers(0, num_domains - 1))
    try:
        source = dataset.leave_out([f"d{target}"], seed=data.draw(st.integers(0, 99)))
        sampler = EpisodeSampler(source.train, context=1, queries=4, seed=0)
    except UserError:  # a split may leave a class without a training image, and says so
        return
    held_out = {int(i) for part in (source.val, source.test) for i in numbers(part)}
    for episode in EpisodeLoader(source.train, sampler).episodes(0, 5):
        drawn = set(episode.merged.x[:, 0].int().tolist())
        assert not drawn & held_out
        assert target not in domains[list(drawn)]
        for number, y in zip(episode.merged.x[:, 0].int(), episode.merged.y, strict=True):
            assert labels[number] == y
    if grouped:
        groups = [set((numbers(p) // 2).tolist()) for p in (source.train, source.val)]
        if (split == UNASSIGNED).all():
            assert not groups[0] & groups[1]


def numbers(part: LabelledImages) -> np.ndarray:
    return part.images.take(np.arange(len(part)))[:, 0].int().numpy()


def simple(num_domains: int = 3, per_cell: int = 6) -> LabelledImages:
    domains = np.repeat(np.arange(num_domains), 2 * per_cell)
    labels = np.tile(np.repeat([0, 1], per_cell), num_domains)
    return labelled(labels, domains, num_domains)


def test_every_domain_gets_its_turn() -> None:
    data = simple()
    sampler = EpisodeSampler(data, context=2, queries=2, seed=0)
    targets = {int(data.domains[sampler(step).target[0]]) for step in range(40)}
    assert targets == {0, 1, 2}


def test_a_step_draws_the_same_whenever_it_is_asked_and_ranks_draw_differently() -> None:
    sampler = EpisodeSampler(simple(), context=2, queries=3, seed=4)
    first = sampler(17)
    sampler(3)
    assert np.array_equal(sampler(17).source, first.source)
    again = EpisodeSampler(simple(), context=2, queries=3, seed=4)(17)
    assert np.array_equal(again.target, first.target)
    assert not np.array_equal(sampler(17, rank=1).source, first.source)


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 3), (2, 9), (5, 5)])
def test_the_loader_gives_the_steps_asked_for_in_order(start: int, stop: int) -> None:
    data = simple()
    loader = EpisodeLoader(data, EpisodeSampler(data, context=2, queries=3, seed=1), ahead=4)
    got = list(loader.episodes(start, stop))
    assert len(got) == stop - start
    for step, episode in enumerate(got, start=start):
        assert isinstance(episode, Episode)
        assert episode.source.x.equal(loader.load(step).source.x)


def test_a_loader_that_is_left_early_stops_its_threads() -> None:
    data = simple()
    loader = EpisodeLoader(data, EpisodeSampler(data, context=2, queries=3, seed=1))
    stream = loader.episodes(0, 10_000)
    next(stream)
    assert any(t.name.startswith("episodes") for t in threading.enumerate())
    stream.close()
    assert not any(t.name.startswith("episodes") for t in threading.enumerate())
    assert next(loader.episodes(0, 1)).num_context == 4


def test_only_classes_that_another_domain_can_show_are_asked() -> None:
    """Domain 0 has classes 0 and 1, domain 1 has 1 and 2: only class 1 can be asked."""
    labels = np.repeat([0, 1, 1, 2], 5)
    data = labelled(labels, np.repeat([0, 1], 10), 2)
    sampler = EpisodeSampler(data, context=2, queries=3, seed=0)
    for step in range(20):
        drawn = sampler(step)
        assert set(labels[drawn.target[drawn.num_context :]].tolist()) == {1}


def test_domains_without_a_common_class_are_refused() -> None:
    data = labelled(np.repeat([0, 1], 5), np.repeat([0, 1], 5), 2)
    with pytest.raises(UserError, match="class in common"):
        EpisodeSampler(data, context=2, queries=3, seed=0)


def test_too_few_images_for_the_context_are_named() -> None:
    with pytest.raises(UserError, match=r"class 'pear' has 6 .* 'd0'.*--context-images 6"):
        EpisodeSampler(simple(), context=7, queries=1, seed=0, classes=("pear", "apple"))


def test_one_domain_points_to_pseudo_domains() -> None:
    with pytest.raises(UserError, match="--pseudo-domains"):
        EpisodeSampler(simple(num_domains=1), context=1, queries=1, seed=0)
