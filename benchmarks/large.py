"""The models of the zoo at sizes that an accelerator is for: a step takes from a few hundred megabytes to gigabytes."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from benchmarks.trainings import MODELS, Model, scanned
from models import bert, gpt, llama, moe

_TOKENS: dict[str, Any] = {"vocab_size": 8192, "sequence_length": 512, "hidden": 1024, "layers": 2, "heads": 16}
_FEW: dict[str, Any] = {**_TOKENS, "hidden": 512, "heads": 8}
_BATCH = 64


def _four_layers(model: Model) -> Model:
    """The same model as a loop over four blocks."""
    looped = scanned(model)
    return replace(looped, config=replace(looped.config, layers=4))


_GPT = replace(MODELS["gpt"], config=gpt.Config(**_TOKENS), batch=_BATCH)

LARGE: Mapping[str, Model] = MappingProxyType(
    {
        "gpt-large": _GPT,
        "gpt-scan-large": _four_layers(_GPT),
        "llama-large": replace(MODELS["llama"], config=llama.Config(**_TOKENS, kv_heads=8, mlp=2816), batch=_BATCH),
        "bert-large": replace(MODELS["bert"], config=bert.Config(**_TOKENS), batch=_BATCH),
        "moe-large": replace(MODELS["moe"], config=moe.Config(**_FEW, experts=8, group_size=512), batch=_BATCH),
        "wide-resnet-large": replace(
            MODELS["wide-resnet"],
            config=replace(MODELS["wide-resnet"].config, image_size=128, base_channels=64, classes=1024),
            batch=256,
        ),
    }
)
"""What `benchmarks.compilers` compiles beside the zoo: two layers have every kind of buffer that a deep model has."""
