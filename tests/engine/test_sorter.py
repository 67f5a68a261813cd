import numpy as np
import pytest
import torch

from burnish.engine.native.sampler import search
from burnish.engine.protocol import Request
from burnish.engine.sorter import SorterEngine, decode_numbers
from burnish.errors import EngineError
from burnish.model.sorter import Sorter
from burnish.recipe.tasks import SortTask
from burnish.rollout.rollout import sample
from burnish.tasks.sorting import Sorting
from burnish.types import Finish, SamplingParams, Weights

TASK = Sorting(SortTask(), seed=0)


def generate(engine, prompts, first=0, samples=4, temperature=1.0, seed=3):
    params = SamplingParams(temperature=temperature, seed=seed)
    return sample(engine, list(enumerate(prompts, first)), samples, params, 0)


def test_a_draw_does_not_depend_on_the_batch():
    engine = SorterEngine(Sorter(5, 3, 10, seed=0))
    whole = generate(engine, TASK.prompts)
    alone = generate(engine, TASK.prompts[1:2], first=1, samples=2)
    for a, b in zip(whole[1][:2], alone[0], strict=True):
        assert np.array_equal(a.token_ids, b.token_ids)
    again = generate(engine, TASK.prompts[1:2], first=2)
    assert any(
        not np.array_equal(a.token_ids, b.token_ids)
        for a, b in zip(whole[1], again[0], strict=True)
    )


def test_log_probabilities_are_the_models_at_the_sampling_temperature():
    model = Sorter(5, 3, 10, seed=0)
    (completions,) = generate(SorterEngine(model), TASK.prompts[:1], temperature=0.7)
    tokens = torch.from_numpy(TASK.prompts[0].token_ids).long()[None]
    expected = torch.log_softmax(model(tokens)[0] / 0.7, -1)
    for completion in completions:
        picked = expected[torch.arange(3), torch.from_numpy(completion.token_ids).long()]
        np.testing.assert_allclose(completion.logprobs, picked.detach().numpy(), atol=1e-6)


def test_samples_follow_the_model():
    model = Sorter(5, 3, 10, seed=1)
    (completions,) = generate(SorterEngine(model), TASK.prompts[:1], samples=20_000)
    tokens = torch.from_numpy(TASK.prompts[0].token_ids).long()[None]
    expected = model(tokens)[0].softmax(-1).detach().numpy() * 20_000
    drawn = np.stack([completion.token_ids for completion in completions])
    for place in range(3):
        counts = np.bincount(drawn[:, place], minlength=5)
        assert ((counts - expected[place]) ** 2 / expected[place]).sum() < 18.5  # 4 degrees: 0.001


def test_temperature_0_is_greedy():
    model = Sorter(5, 3, 10, seed=0)
    ((completion,),) = generate(SorterEngine(model), TASK.prompts[:1], samples=1, temperature=0.0)
    tokens = torch.from_numpy(TASK.prompts[0].token_ids).long()[None]
    assert completion.token_ids.tolist() == model(tokens)[0].argmax(-1).tolist()


def test_a_token_of_probability_0_is_never_drawn():
    weights = torch.tensor([0.0, 0.5, 0.5, 0.0]).expand(4, 4)
    draws = torch.tensor([0.0, 0.4999, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    assert search(weights, draws[:, None])[0][:, 0].tolist() == [1, 1, 2, 2]


def test_loaded_weights_stamp_their_version():
    engine = SorterEngine(Sorter(5, 3, 10, seed=0))
    other = Sorter(5, 3, 10, seed=1)
    engine.load(Weights(4, 0, dict(other.state_dict())))
    (got,) = generate(engine, TASK.prompts[:1])
    (expected,) = generate(SorterEngine(other), TASK.prompts[:1])
    assert got[0].versions.tolist() == [4, 4, 4]
    assert np.array_equal(got[0].token_ids, expected[0].token_ids)


def test_a_response_is_whole_and_written_as_prompts_are():
    (completions,) = generate(SorterEngine(Sorter(12, 3, 10, seed=0)), TASK.prompts[:1])
    for completion in completions:
        assert completion.finish is Finish.STOP
        assert completion.text == " ".join(map(str, completion.token_ids))
        assert "".join(decode_numbers(completion.token_ids)) == completion.text


def test_requests_that_are_sampled_otherwise_take_a_step_of_their_own():
    engine = SorterEngine(Sorter(5, 3, 10, seed=0))
    for k, temperature in enumerate((1.0, 0.0, 1.0)):
        params = SamplingParams(temperature=temperature)
        engine.submit(Request(str(k), TASK.prompts[k].token_ids, 2, params, group=k))
    assert engine.unfinished == 6
    assert [c.request_id for c in engine.step()] == ["0", "0", "2", "2"]
    engine.abort("1")
    assert engine.unfinished == 2
    assert [(c.finish, len(c.token_ids)) for c in engine.step()] == [(Finish.ABORT, 0)] * 2
    assert (engine.unfinished, engine.sampled) == (0, 12)


def test_load_refuses_and_keeps_the_old_weights():
    engine = SorterEngine(Sorter(5, 3, 10, seed=0))
    good = dict(Sorter(5, 3, 10, seed=1).state_dict())
    engine.load(Weights(4, 2, good))
    with pytest.raises(EngineError, match=r"incarnation 1 .*version 4 stays"):
        engine.load(Weights(5, 1, good))
    with pytest.raises(EngineError, match=r"finite.*version 4 stays"):
        engine.load(Weights(5, 2, {name: x * torch.inf for name, x in good.items()}))
    assert engine.version == 4
