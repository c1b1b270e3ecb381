"""The plugin in Megatron's own training program: from its flags to its end.

`register` asks to be told when modules of Megatron are imported, and wraps the few functions that
a training program goes through before anybody can bind their names. Nothing is imported early, and
without `--adaptra` every wrapper only calls what it wraps.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import wrapt

from megatron_adaptra.adapter.entry import flags
from megatron_adaptra.config import AdaptraConfig
from megatron_adaptra.errors import AdaptraError, UnsupportedBackend, UnsupportedMegatron
from megatron_adaptra.log import log_line


class Plugin:
    """This process's plugin. `config` is None without `--adaptra`, `session` until it trains."""

    def __init__(self) -> None:
        self.config: AdaptraConfig | None = None
        self.activation: Any = None
        self._undo: list[Callable[[], None]] = []  # beside the activation
        self.missing: list[str] = []  # functions of Megatron's that were to be wrapped

    @property
    def session(self) -> Any:
        return self.activation.session if self.activation is not None else None

    # Wrappers, in the order in which a training program gets to them.

    def parse_args(self, wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        """Megatron may parse more than once: in-process restart looks ahead."""
        try:
            self.config = flags.read(sys.argv[1:])
        except AdaptraError as error:
            flags.fail(error)
        provider, rest = (
            (args[0], args[1:]) if args else (kwargs.pop("extra_args_provider", None), ())
        )
        return wrapped(flags.with_ours(provider), *rest, **kwargs)

    def validate_args(self, wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        if self.config is not None:
            try:
                self._check(result if result is not None else args[0])
            except AdaptraError as error:
                flags.fail(error)
        return result

    def _check(self, args: Any) -> None:
        """Everything that can be said before processes meet."""
        from megatron_adaptra.adapter.compat.profiles import profile
        from megatron_adaptra.transport.scenario import load_rules

        assert self.config is not None
        flags.refuse(args)
        profile()
        if self.missing:
            self._train_as_stock(UnsupportedMegatron(f"{self.missing[0]} does not exist"))
            return
        load_rules(self.config.emulate_link, args.pipeline_model_parallel_size)
        if args.adaptra_dry_run:
            from megatron_adaptra.adapter.entry.dry_run import show

            show(args, self.config)
            sys.exit(0)

    def setup(self, wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        """Around `setup_model_and_optimizer`: the groups exist, and a checkpoint gets loaded."""
        if self.config is None or self.activation is not None:
            return wrapped(*args, **kwargs)
        self._activate()
        result = wrapped(*args, **kwargs)
        if self.session is not None:
            from megatron_adaptra.adapter.entry import checkpoint
            from megatron_adaptra.adapter.step import attach

            checkpoint.resume(self.session)
            self._undo.append(attach.attach(self.session, result))
        return result

    def _activate(self) -> None:
        from megatron_adaptra.adapter.entry.activate import activate

        assert self.config is not None
        try:
            self.activation = activate(self.config)
        except (UnsupportedBackend, UnsupportedMegatron) as error:
            self._train_as_stock(error)
            return
        self.session.announce = True
        self._undo.append(self.session.watchdog.end_on_signal())

    def _train_as_stock(self, error: AdaptraError) -> None:
        assert self.config is not None
        if self.config.strict:
            flags.fail(error)
        if os.environ.get("RANK", "0") == "0":
            log_line(f"WARNING: training goes on as stock Megatron: {error}")
        self.config = None

    def train_step(self, wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        if self.session is None:
            return wrapped(*args, **kwargs)
        place = f"iteration {self.session.iteration}, outside the pipeline's messages"
        self.session.watchdog.phase = place
        reruns = self.session.reruns

        def run() -> Any:
            return wrapped(*args, **kwargs)

        result = run() if reruns is None else reruns.train(run)
        self.session.iteration_done()
        return result

    def training_log(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if self.session is None:
            return wrapped(*args, **kwargs)
        from megatron_adaptra.adapter.entry import training_log

        return training_log.training_log(self.session, wrapped, args, kwargs)

    def save_checkpoint(self, wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        if self.session is not None:
            from megatron_adaptra.adapter.entry import checkpoint

            checkpoint.save(self.session, args[0] if args else kwargs["iteration"])
        return result

    def pretrain(self, wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        """Whatever ends training, its own exit conditions included, ends the plugin too."""
        try:
            return wrapped(*args, **kwargs)
        except Exception as error:
            # At once: closing takes time, and torchrun's SIGTERM may come before the traceback.
            if self.session is not None and (words := self.session.watchdog.failure_message(error)):
                log_line(words)
            raise
        finally:
            activation, self.activation = self.activation, None
            if activation is not None:
                while self._undo:
                    self._undo.pop()()
                activation.undo()


PLUGIN = Plugin()
_Wrapper = Callable[[Any, Any, Any, Any], Any]
# What of Megatron is wrapped, by module; the version guard and `scripts/drift.py` know them too.
WRAPPED: Mapping[str, Mapping[str, _Wrapper]] = {
    "megatron.training.arguments": {
        "parse_args": PLUGIN.parse_args,
        "validate_args": PLUGIN.validate_args,
    },
    "megatron.training.checkpointing": {"save_checkpoint": PLUGIN.save_checkpoint},
    "megatron.training.training": {
        "pretrain": PLUGIN.pretrain,
        "setup_model_and_optimizer": PLUGIN.setup,
        "train_step": PLUGIN.train_step,
        "training_log": PLUGIN.training_log,
    },
}
_registered = False


def register() -> None:
    """Put `--adaptra` into Megatron's parser, and what it needs into its training program.

    Call it before anything imports Megatron; a second call does nothing. On a machine without CUDA
    where the command line asks for gloo, the CPU stand-ins are installed first. Raises RuntimeError
    if Megatron's training program has been imported already.
    """
    global _registered
    if _registered:
        return
    late = [name for name in WRAPPED if name in sys.modules]
    if late:
        raise RuntimeError(f"call megatron_adaptra.register() before anything imports {late[0]}")
    _registered = True
    if _asks_for_gloo(sys.argv[1:]):
        _stand_in_for_cuda()
    for module, wrappers in WRAPPED.items():
        wrapt.register_post_import_hook(_hook(wrappers), module)


def _hook(wrappers: Mapping[str, _Wrapper]) -> Callable[[Any], None]:
    def wrap(module: Any) -> None:
        for name, wrapper in wrappers.items():
            if hasattr(module, name):
                wrapt.wrap_function_wrapper(module, name, wrapper)
            else:
                PLUGIN.missing.append(f"{module.__name__}.{name}")

    return wrap


def _asks_for_gloo(argv: list[str]) -> bool:
    """Whether `--distributed-backend gloo` is there: Megatron's word for training on CPUs."""
    flag = "--distributed-backend"
    return f"{flag}=gloo" in argv or any(pair == (flag, "gloo") for pair in pairwise(argv))


def _stand_in_for_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        from megatron_adaptra.adapter.baseline import cpu

        cpu.install()
