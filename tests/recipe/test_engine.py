"""Each engine and runtime has only its own settings, and recipes of earlier runs can be read."""

import pytest

from burnish.errors import ConfigError
from burnish.recipe.engine import HfConfig, NativeConfig, SglangConfig, VllmConfig
from burnish.recipe.load import load_recipe, recipe_to_toml
from burnish.recipe.runtime import LocalRuntime, RayRuntime, TorchrunRuntime


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["engine=hf", "engine.kv_mb=9"],
            "engine.kv_mb has no effect with engine = 'hf'; remove it, or use engine.name = "
            "'native' or 'vllm'",
        ),
        (
            ["engine.weights=tensor"],
            "engine.weights has no effect with engine = 'native'; remove it, or use engine.name = "
            "'sglang'",
        ),
        (["engine=sglang"], "engine.url is missing: 'sglang' needs it"),
        (["engine=vlm"], "engine.name must be native or hf or vllm or sglang, got 'vlm'; did you"),
        (
            ["runtime.threads=2"],
            "runtime.threads has no effect with runtime = 'local'; remove it, or use runtime.name "
            "= 'ray' or 'torchrun'",
        ),
        (["engine.kv_bm=9"], "unknown setting 'engine.kv_bm'; did you mean 'engine.kv_mb'?"),
    ],
)
def test_a_setting_of_another_engine_is_rejected_with_the_engines_that_have_it(overrides, message):
    with pytest.raises(ConfigError) as caught:
        load_recipe("keywords", overrides)
    assert str(caught.value).startswith(message)


def test_a_bare_name_selects_an_engine_and_a_runtime():
    recipe = load_recipe("keywords", {"engine": "vllm", "runtime": "torchrun", "mesh.shard": 2})
    assert recipe.engine == VllmConfig()
    assert recipe.runtime == TorchrunRuntime()
    defaults = load_recipe("keywords")
    assert (defaults.engine, defaults.runtime) == (NativeConfig(), LocalRuntime())


def test_another_engine_keeps_the_settings_that_it_shares():
    """gsm8k sets kv_mb and max_running of the native engine."""
    own = load_recipe("gsm8k").engine
    assert (own.kv_mb, own.max_running) != (NativeConfig().kv_mb, NativeConfig().max_running)
    vllm = load_recipe("gsm8k", ["engine.name=vllm"]).engine
    assert vllm == VllmConfig(kv_mb=own.kv_mb, max_running=own.max_running)
    hf = load_recipe("gsm8k", ["engine.name=hf"]).engine
    assert hf == HfConfig(max_running=own.max_running)


def test_another_runtime_drops_the_settings_that_it_lacks():
    ray = load_recipe("sort", ["runtime=ray", "runtime.generator.cpus=2", "runtime.deadline=5"])
    assert load_recipe(ray, ["runtime=local"]).runtime == LocalRuntime()
    language = load_recipe(
        "keywords", ["runtime=ray", "runtime.generators=2", "runtime.deadline=5"]
    )
    changed = load_recipe(language, ["runtime=torchrun", "mesh.shard=2"])
    assert changed.runtime == TorchrunRuntime(deadline=5)


EARLIER = {
    'name = "native"\nprecision = "auto"\nkv_mb = 1024\nmax_running = 128': NativeConfig(),
    'name = "native"\nurl = "tcp://a:1"\ndeadline = 600.0\nprecision = "auto"': (
        NativeConfig(url="tcp://a:1")
    ),
    'name = "hf"\ndeadline = 600.0\nprecision = "auto"\nmax_running = 128': HfConfig(),
    'name = "vllm"\ndeadline = 600.0\nprecision = "auto"\nkv_mb = 1024\nmax_running = 128\n'
    "sleep = false": VllmConfig(),
    'name = "sglang"\nurl = "http://a:1"\ndeadline = 600.0\nprecision = "auto"\n'
    'max_running = 128\nsleep = false\nweights = "disk"': SglangConfig(url="http://a:1"),
}
"""Engine sections as runs wrote them when all engines had one section."""


@pytest.mark.parametrize("text", EARLIER, ids=lambda text: text.split('"')[1])
def test_the_engine_of_an_earlier_run_is_read_and_written_as_before(text, tmp_path):
    file, section = tmp_path / "recipe.toml", f"[engine]\n{text}\n"
    written = recipe_to_toml(load_recipe("keywords"))
    start, end = written.index("[engine]"), written.index("[objective]")
    file.write_text(f"{written[:start]}{section}\n{written[end:]}")
    recipe = load_recipe(file)
    assert recipe.engine == EARLIER[text]
    assert section in recipe_to_toml(recipe)


def test_the_runtime_of_an_earlier_run_is_read_and_written_as_before(tmp_path):
    section = (
        '[runtime]\nname = "ray"\ngenerators = 2\ntransport = "auto"\ndeadline = 600.0\n\n'
        "[runtime.generator]\ncpus = 1.0\ngpus = 0.0\n\n[runtime.generator.custom]\n\n"
        "[runtime.learner]\ncpus = 1.0\ngpus = 0.0\n\n[runtime.learner.custom]\n"
    )
    file = tmp_path / "recipe.toml"
    file.write_text(section)
    recipe = load_recipe(file)
    assert recipe.runtime == RayRuntime(generators=2)
    assert section.partition("\n\n")[0] in recipe_to_toml(recipe)
