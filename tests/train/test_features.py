"""The table of Megatron's features, as configs of all releases ask for them."""

import enum
from types import SimpleNamespace as Config

import pytest

from megatron_adaptra.adapter.compat.features import FEATURES, Effect, effect_of

Scope = enum.Enum("Scope", ["attn", "full_iteration"])  # as from 0.16 on
WHOLE = [
    Config(enable_cuda_graph=True, cuda_graph_scope="full_iteration"),  # 0.14, 0.15
    Config(cuda_graph_impl="local", cuda_graph_scope=[Scope.full_iteration]),  # 0.16 to 0.18
    Config(cuda_graph_impl="full_iteration"),  # from 0.19 on
]
LAYERS = [
    Config(enable_cuda_graph=True, cuda_graph_scope="full"),
    Config(external_cuda_graph=True, cuda_graph_scope="attn"),
    Config(cuda_graph_impl="local", cuda_graph_scope=[]),
    Config(cuda_graph_impl="transformer_engine", cuda_graph_scope=[Scope.attn]),
]
NONE = [
    Config(),
    Config(enable_cuda_graph=False, external_cuda_graph=False, cuda_graph_scope="full"),
    Config(cuda_graph_impl="none", cuda_graph_scope=[]),
]


@pytest.mark.parametrize("config", WHOLE)
def test_a_captured_iteration_is_megatrons(config):
    assert "whole iterations" in effect_of(config, Effect.STOCK)
    assert not effect_of(config, Effect.PINNED)


@pytest.mark.parametrize("config", LAYERS)
def test_captured_layers_keep_megatrons_warmup(config):
    assert "single layers" in effect_of(config, Effect.PINNED)
    assert not effect_of(config, Effect.STOCK)


@pytest.mark.parametrize("config", NONE)
def test_nothing_captured_changes_nothing(config):
    assert not any(effect_of(config, effect) for effect in Effect)


def test_ucc_is_megatrons():
    assert "UCC" in effect_of(Config(pipeline_model_parallel_comm_backend="ucc"), Effect.STOCK)
    assert not effect_of(Config(pipeline_model_parallel_comm_backend="nccl"), Effect.STOCK)


def test_what_changes_something_can_be_asked_for():
    for feature in FEATURES:
        assert (feature.used is None) == (feature.effect in (Effect.WORKS, Effect.EXPECTED))
