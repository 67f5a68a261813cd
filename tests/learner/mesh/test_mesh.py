"""A mesh takes the same steps as one process, whatever its shape; gloo, on tiny models."""

import dataclasses
import json
import math
import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from burnish.learner.learner import LocalLearner
from burnish.learner.mesh.mesh import Mesh, responsible
from burnish.learner.optimizer import Optimizer
from burnish.learner.program import compile
from burnish.learner.protocol import LearnerState
from burnish.learner.ranks import local
from burnish.model import chained, shards
from burnish.model.critic import Critic
from burnish.model.shards import Shards
from burnish.model.transformer import Transformer
from burnish.rollout.packing import first_token, pack
from tests.learner.conftest import CONFIG, make_groups, make_learn_batch, make_learner
from tests.learner.gang import run_ranks

WHITENED = {
    "advantage": "reinforce_plus_plus_baseline",
    "kl": {"name": "k3", "coefficient": 0.1, "refresh": 1},
    "entropy_coefficient": 0.01,
}
"""An objective that looks at the whole batch, at a reference and at entropies."""
MOVING = {
    "kl": {"name": "k3", "coefficient": 0.1, "ema": 0.5},
    "entropy_coefficient": 0.01,
    "entropy": {"target": 9.0, "delta": 0.01},
}
"""An objective whose reference and entropy coefficient change after each gradient step."""
GAE = {"advantage": {"name": "gae", "whiten": True}}
UNEVEN = ((5, (4, 1, 6, 4)), (3, (7, 2, 7)), (1, (3, 5, 5)), (6, (2, 2)), (2, (17, 1)))
FAMILIES = {
    "llama": CONFIG,
    "qwen3": dataclasses.replace(CONFIG, family="qwen3", tied=False, fp32_head=True),
    "qwen2": dataclasses.replace(CONFIG, family="qwen2", vocab_size=38),
}


def both(sizes, family, dtype, objective=None, critic=None, gather="step", **train):
    """A learner of one process, and the same learner on a mesh."""
    shape = FAMILIES[family]
    train = {"micro_tokens": 24, "clip_norm": 0.5, "weight_decay": 0.3} | train

    def policy():
        model = Transformer(shape).init_weights(3).to(dtype)
        return model.learn(recompute=family == "qwen2")

    alone = make_learner(policy(), objective, critic, **train)
    mesh, model, values = Mesh(sizes, shape, gather=gather), policy(), None
    if critic is not None:
        own = alone.optimizers["critic"].train
        values = Optimizer(Critic(model, shared=alone.program.critic.shared), own, mesh)
    program = compile(alone.program.objective, alone.program.critic)
    return alone, LocalLearner(model, program, alone.train, critic=values, ranks=mesh)


def take_steps(alone, meshed, number, dtype):
    """The same rollout for both; their metrics and log-probabilities must agree."""
    tolerance = 1e-10 if dtype == torch.float64 else 2e-5
    batch = pack(make_groups(UNEVEN))
    for learner in (alone, meshed):
        learner.begin(number)
    for ours, theirs in zip(alone.score(batch), meshed.score(batch), strict=True):
        if ours is not None:
            torch.testing.assert_close(theirs, ours, rtol=tolerance, atol=tolerance)
    learn = make_learn_batch(alone, batch)
    meshed.score(batch)  # because the line before has scored, too
    for _ in range(2):
        expected, found = alone.step(learn), meshed.step(learn)
        assert found == pytest.approx(expected, rel=100 * tolerance, abs=100 * tolerance)
    expected, found = alone.finish()[0], meshed.finish()[0]
    assert found == pytest.approx(expected, rel=100 * tolerance, abs=100 * tolerance)


def check_weights(alone, meshed, tolerance):
    """Rank 0 has all weights, and the other ranks have none."""
    expected, found = alone.weights(), meshed.weights()
    assert found.version == expected.version
    assert dist.get_rank() or found.tensors.keys() == expected.tensors.keys()
    for name, tensor in found.tensors.items():
        torch.testing.assert_close(tensor, expected.tensors[name], rtol=0, atol=tolerance)


def whole_state(learner):
    """The state that the ranks' pieces make together."""
    tensors, numbers = learner.state()
    pieces = [None] * dist.get_world_size()
    dist.all_gather_object(pieces, learner.ranks.shards(tensors))
    found = {}
    for rank in pieces:
        for name, boxes in rank.items():
            for shape, at, box in boxes:
                whole = found.setdefault(name, torch.full(shape, math.nan, dtype=box.dtype))
                place = tuple(slice(a, a + n) for a, n in zip(at, box.shape, strict=True))
                assert whole[place].isnan().all(), "two ranks have the same numbers"
                whole[place] = box
    return LearnerState(found, numbers)


def check_step(rank, sizes):
    """Whitening and a KL over uneven packs, in float64, and by layers in float32.

    Adam divides a gradient by its size, so the rounding of a small one is that of a step of 1e-2.
    """
    for dtype, tolerance, gather in (
        (torch.float64, 1e-10, "step"),
        (torch.float32, 5e-5, "layer"),
    ):
        pair = both(sizes, "qwen3", dtype, WHITENED, gather=gather)
        take_steps(*pair, 0, dtype)
        check_weights(*pair, tolerance)


def check_chained(rank, sizes):
    """The inputs of linear layers are computed again in the backward pass, as on a GPU."""
    with mock.patch.object(chained, "fuses", return_value=True):
        check_step(rank, sizes)


def check_average(rank, sizes):
    """A reference that is a moving average, and an entropy coefficient, from rollout to rollout; in
    bf16 the averages of the shards are in fp32. A state of the ranks goes on elsewhere."""
    alone, meshed = pair = both(sizes, "qwen3", torch.float64, MOVING)
    for number in range(2):
        take_steps(*pair, number, torch.float64)
    expected, found = alone.state(), whole_state(meshed)
    assert found.numbers == expected.numbers
    assert found.numbers["program"]["entropy_coefficient"] == pytest.approx(0.05)
    assert any(name.startswith("policy.reference.") for name in found.tensors)
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        torch.testing.assert_close(found.tensors[name], tensor, rtol=0, atol=1e-10)
    _, fresh = both(sizes[::-1], "qwen3", torch.float64, MOVING)
    fresh.load_state(found)
    take_steps(alone, fresh, 2, torch.float64)
    alone, meshed = both(sizes, "qwen3", torch.float32, MOVING, precision="bf16")
    own = [(name, p) for name, p in meshed.policy.named_parameters() if p.requires_grad]
    want = {name: local(p).double() for name, p in own}
    learn = make_learn_batch(alone, pack(make_groups(UNEVEN)))
    for _ in range(2):
        meshed.step(learn)
        want = {name: 0.5 * want[name] + 0.5 * local(p).double() for name, p in own}
    reference = dict(meshed.reference.named_parameters())
    for name, average in want.items():
        held = local(meshed.state().tensors[f"policy.reference.{name}"])
        assert held.dtype == torch.float32
        torch.testing.assert_close(held.double(), average, rtol=0, atol=1e-6)
        assert torch.equal(local(reference[name]), held.bfloat16())


def check_more(rank, sizes):
    """Drift, a reference that moves, recomputed layers; critics; and a state that moves."""
    pair = both(sizes, "qwen2", torch.float64, WHITENED, log_kl=True)
    for number in range(2):
        take_steps(*pair, number, torch.float64)
    check_weights(*pair, 1e-10)
    for shared in (True, False):
        section = {"shared": shared, "learning_rate": 1e-2, "warmup_rollouts": 1}
        pair = both(sizes, "llama", torch.float64, GAE, section, micro_tokens=None)
        for number in range(2):
            take_steps(*pair, number, torch.float64)
        check_weights(*pair, 1e-10)
    check_state(pair, sizes)


def check_state(pair, sizes):
    """The pieces make the state of one process, and other meshes go on from it as it does."""
    alone, meshed = pair
    expected, found = alone.state(), whole_state(meshed)
    assert found.numbers == expected.numbers
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        torch.testing.assert_close(found.tensors[name], tensor, rtol=0, atol=1e-10)
    section = alone.program.critic.model_dump()
    for other in sorted({sizes[::-1], (dist.get_world_size(), 1, 1)}):
        _, fresh = both(other, "llama", torch.float64, GAE, section, micro_tokens=None)
        fresh.load_state(found)
        take_steps(alone, fresh, 2, torch.float64)
        alone.load_state(found)


def check_reads(rank, folder, sizes, others):
    """The ranks write a checkpoint; other meshes, and one process, go on from it. A rank reads only
    its own part of the weights and moments, so that replicas together read them once each."""
    section = {"shared": False, "learning_rate": 1e-2}
    alone, meshed = both(sizes, "qwen3", torch.float64, GAE, section)
    take_steps(alone, meshed, 0, torch.float64)
    state = meshed.state()
    shards.write_shards(folder, rank, meshed.ranks.shards(state.tensors))
    dist.barrier()
    if not rank:
        shards.write_index(folder)
        save_file({"held": torch.arange(3)}, folder / shards.MAIN)
    dist.barrier()
    found = {name: Shards(folder) for name in ("whole", *others)}
    assert torch.equal(found["whole"]["held"], torch.arange(3))
    expected = alone.state().tensors
    for name, tensor in expected.items():
        torch.testing.assert_close(found["whole"][name], tensor, rtol=0, atol=1e-10)
    earlier = json.loads((folder / shards.INDEX).read_text())
    for box in (box for entry in earlier.values() for box in entry["boxes"]):
        del box["size"]
    found["earlier"] = Shards(folder)
    found["earlier"]._index = earlier  # as it was before it held sizes
    for name, tensor in expected.items():
        torch.testing.assert_close(found["earlier"][name], tensor, rtol=0, atol=1e-10)
    size = sum(tensor.nbytes for tensor in expected.values())
    assert found["whole"].bytes_read == size + 3 * 8
    for other in others:
        _, fresh = both(other, "qwen3", torch.float64, GAE, section)
        fresh.load_state(LearnerState(pickle.loads(pickle.dumps(found[other])), state.numbers))
        own = sum(local(tensor).nbytes for tensor in fresh.state().tensors.values())
        read = Shards(folder)
        fresh.load_state(LearnerState(read, state.numbers))
        assert read.bytes_read == own
        assert own < 1.2 * size / (other[1] * other[2])
        take_steps(alone, fresh, 1, torch.float64)
        alone.load_state(LearnerState(found["whole"], state.numbers))
    dist.barrier()


class Gathers(TorchDispatchMode):
    """Counts them."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "allgather" in str(func)
        return func(*args, **kwargs or {})


def check_gathers(rank, sizes):
    """Each layer, and the weights outside of them, once a step, or twice a pack."""
    counts = {}
    for gather in ("step", "layer"):
        _, meshed = both(sizes, "llama", torch.float32, gather=gather)
        learn = make_learn_batch(meshed, pack(make_groups(UNEVEN)))
        with Gathers() as gathers:
            meshed.step(learn)
        counts[gather] = gathers.count
    packs = len(meshed._cut(learn.batch))
    parts = CONFIG.n_layers + 1
    assert packs > 1
    assert counts == {"step": parts, "layer": 2 * packs * parts}


def test_shards_take_the_steps_of_one_process():
    run_ranks(2, check_step, (1, 2, 1))


@pytest.mark.slow
def test_shards_average_a_reference_as_one_process():
    run_ranks(2, check_average, (1, 2, 1))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2)], ids=str)
def test_a_mesh_averages_a_reference_as_one_process(sizes):
    run_ranks(math.prod(sizes), check_average, sizes)


def test_weights_are_gathered_once_a_step():
    run_ranks(2, check_gathers, (1, 2, 1))


@pytest.mark.slow
def test_a_rank_reads_its_own_part_of_a_checkpoint(tmp_path):
    run_ranks(2, check_reads, tmp_path, (1, 2, 1), [(1, 2, 1), (1, 1, 2), (2, 1, 1)])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 1, 2)], ids=str)
def test_four_ranks_read_their_own_parts_of_a_checkpoint(tmp_path, sizes):
    run_ranks(4, check_reads, tmp_path, sizes, [(1, 4, 1), (1, 2, 2), (2, 2, 1)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (2, 1, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (2, 2, 2)], ids=str
)
def test_a_mesh_takes_the_steps_of_one_process(sizes):
    run_ranks(math.prod(sizes), check_step, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 1, 2)], ids=str)
def test_a_mesh_computes_inputs_again(sizes):
    run_ranks(2, check_chained, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 1, 2)], ids=str)
def test_copies_critics_and_states(sizes):
    run_ranks(2, check_more, sizes)


def test_responses_are_divided_by_tokens():
    """Tokens up to the middle of a response, prompts with their first: 19 of 20 + 17 + 14 + 10."""
    batch = pack(make_groups(UNEVEN))
    ranks = responsible(batch, 3)
    assert ranks.tolist() == sorted(ranks.tolist())
    lengths = batch.segment_offsets.diff()[~batch.segment_is_prompt]
    shares = [int(lengths[ranks == rank].sum()) for rank in range(3)]
    assert max(shares) - min(shares) <= int(lengths.max())
    assert responsible(batch, 1).tolist() == [0] * len(lengths)


def test_the_empty_pack_has_no_action():
    one = first_token(pack(make_groups(UNEVEN)))
    assert one.slots.tolist() == [0]
    assert not one.batch.is_action.any()
    assert len(one.batch.rewards) == 0
