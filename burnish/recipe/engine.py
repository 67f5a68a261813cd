"""The sections of the engines, which sample responses; each has only the settings that its engine
reads.

An engine's precision may differ from the learner's, ``train.precision``.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from burnish.recipe.base import BY_NAME, Section, named

Precision = Literal["auto", "fp32", "bf16", "fp16"]
""""auto": bf16 if the CPU or GPU supports it, else fp32."""
KV_MB = 1024
"""Default size of the cache in MB, which estimates also assume for engines without the setting."""


def _check_tcp(url: str) -> str:
    if not url.startswith("tcp:"):
        raise ValueError(
            "must be tcp://HOST:PORT, where `burnish engine serve` listens, got "
            f"{url!r}; SGLang, and no other engine, is reached by HTTP; to encrypt the connection, "
            "go through an SSH tunnel"
        )
    return url


def _check_http(url: str) -> str:
    if not url.startswith("http"):
        raise ValueError(
            "must be the url of an SGLang server, such as http://127.0.0.1:30000, got "
            f"{url!r}; to use the engine that listens there, set engine.name to native, hf or vllm"
        )
    return url


Url = Annotated[
    str,
    Field(pattern=r"^(tcp://[^/@]+:\d+|http://[^/@]+:\d+(/[^?#@]*)?|https://[^/@]+(/[^?#@]*)?)$"),
]
TcpUrl = Annotated[Url, AfterValidator(_check_tcp)]
ServedUrl = Annotated[
    TcpUrl | None,
    Field(description="tcp://HOST:PORT of `burnish engine serve`; None: the engine is started"),
]
HttpUrl = Annotated[
    Url,
    AfterValidator(_check_http),
    Field(description="the server, such as http://127.0.0.1:30000"),
]
Deadline = Annotated[
    float, Field(gt=0, description="timeout in seconds of a call to another process")
]
EnginePrecision = Annotated[Precision, Field(description="auto: the same as train.precision")]
MaxRunning = Annotated[int, Field(ge=1, description="maximum number of samples decoded at once")]
KvMegabytes = Annotated[int, Field(ge=1, description="memory for keys and values, in MB")]
Python = Annotated[
    str | None, Field(description="Python of the engine's environment; None: this process's")
]
Sleep = Annotated[
    bool, Field(description="whether the engine frees the GPU while the learner runs")
]


class EngineConfig(Section):
    """Base class of the engines' sections."""

    name: str
    repeats: ClassVar[bool] = True
    """Whether the engine draws the same samples again if the same group is sampled again."""

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        python, url = getattr(self, "python", None), getattr(self, "url", None)
        if python is not None and url is not None:
            raise ValueError(
                f"has python = '{python}', which starts an engine, and url = '{url}', which names "
                "one that runs; remove one"
            )
        return self


class NativeConfig(EngineConfig):
    """burnish's own engine, in this process unless ``python`` or ``url`` is set."""

    key: ClassVar[None] = None
    sleep: ClassVar[bool] = False
    name: Literal["native"] = "native"
    python: Python = None
    url: ServedUrl = None
    deadline: Deadline = 600.0
    precision: EnginePrecision = "auto"
    kv_mb: KvMegabytes = KV_MB
    max_running: MaxRunning = 128

    @property
    def is_apart(self) -> bool:
        """Whether the engine runs in another process."""
        return self.python is not None or self.url is not None


class HfConfig(EngineConfig):
    """An engine that samples with Hugging Face's transformers, in another process."""

    is_apart: ClassVar[bool] = True
    key: ClassVar[None] = None
    sleep: ClassVar[bool] = False
    kv_mb: ClassVar[int] = KV_MB
    name: Literal["hf"] = "hf"
    python: Python = None
    url: ServedUrl = None
    deadline: Deadline = 600.0
    precision: EnginePrecision = "auto"
    max_running: MaxRunning = 128


class VllmConfig(EngineConfig):
    """An engine that samples with vLLM, in another process."""

    is_apart: ClassVar[bool] = True
    repeats: ClassVar[bool] = False
    key: ClassVar[None] = None
    name: Literal["vllm"] = "vllm"
    python: Python = None
    url: ServedUrl = None
    deadline: Deadline = 600.0
    precision: EnginePrecision = "auto"
    kv_mb: KvMegabytes = KV_MB
    max_running: MaxRunning = 128
    sleep: Sleep = False


class SglangConfig(EngineConfig):
    """An engine that samples with an SGLang server, which runs already."""

    is_apart: ClassVar[bool] = True
    python: ClassVar[None] = None
    kv_mb: ClassVar[int] = KV_MB
    name: Literal["sglang"] = "sglang"
    url: HttpUrl
    key: str | None = Field(
        None,
        pattern=r"^[A-Z_][A-Z0-9_]*$",
        description="environment variable with the server's API key; None if it needs no key",
    )
    deadline: Deadline = 600.0
    precision: EnginePrecision = "auto"
    max_running: MaxRunning = 128
    sleep: Sleep = False
    weights: Literal["disk", "tensor", "distributed"] = Field(
        "disk", description="how weights reach the server"
    )


AnyEngine = Annotated[NativeConfig | HfConfig | VllmConfig | SglangConfig, BY_NAME, named("native")]
