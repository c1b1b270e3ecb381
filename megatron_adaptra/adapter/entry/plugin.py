"""The plugin in Megatron's own training program: from its flags to its end.

`register` asks to be called when modules of Megatron are imported, and the functions that a
training program goes through are wrapped before any module can bind their names. Nothing is
imported early. Without `--adaptra` every wrapper only calls what it wraps.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import wrapt

from megatron_adaptra.adapter.compat.patches import PATCHES, Job, is_there, patch, resolve
from megatron_adaptra.adapter.compat.profiles import misfit
from megatron_adaptra.adapter.entry import flags
from megatron_adaptra.base.errors import (
    AdaptraError,
    BadInput,
    UnsupportedBackend,
    UnsupportedMegatron,
)
from megatron_adaptra.base.log import GOES_ON, log_line
from megatron_adaptra.config import AdaptraConfig

_NOT_READ = "the script has not called Megatron's training program, which reads it"


class Plugin:
    """A plugin wraps the functions of Megatron's training program in this process.

    `config` is None without `--adaptra`, `activation` until it trains, and both after its end.
    """

    def __init__(self) -> None:
        self.config: AdaptraConfig | None = None
        self.activation: Any = None
        self._stack = contextlib.ExitStack()  # of what `wrap` did
        self._refused = False  # this Megatron trains as stock
        self._why = _NOT_READ  # the flags have had no effect; empty where they had one
        self._next = 0  # Megatron's number of the iteration to come, unless it skips that one
        self.wrappers: Mapping[str, Callable[[Any, Any, Any, Any], Any]] = {  # by entry's id
            "flags": self._parse_args,
            "checks": self._validate_args,
            "checkpoints": self._save_checkpoint,
            "end": self._pretrain,
            "setup": self._setup,
            "step": self._train_step,
            "log": self._training_log,
        }

    @property
    def session(self) -> Any:
        """This rank's plugin while it trains, else None."""
        return self.activation.session if self.activation is not None else None

    def had_no_effect(self) -> str:
        """Return why `--adaptra` has done nothing in this process, which ends; "" where it has."""
        by_hand = f"{__package__}.activate" in sys.modules  # by the script itself, perhaps
        return "" if by_hand and not self._refused else self._why

    def wrap(self, module: Any) -> None:
        """Put our wrappers into a `module` of Megatron's that has just been imported.

        A function that it lacks is left out: `resolve` reports it, if the flags ask for the plugin.
        """
        for entry, wrapper in self.wrappers.items():
            (target,) = PATCHES[entry].targets
            of_module, _, name = target.partition(":")
            if of_module != module.__name__:
                continue
            if is_there(target):
                stand_in = wrapt.FunctionWrapper(getattr(module, name), wrapper)
                self._stack.enter_context(patch(entry, **{name: stand_in}))
            elif entry == "flags":
                self._without_flags()

    def _without_flags(self) -> None:
        """Read our flags, and hide them from a Megatron whose parser we do not know."""
        sys.argv[1:] = self._read_flags()
        if self.config is not None:
            self._train_as_stock(misfit(f"{PATCHES['flags'].targets[0]} does not exist"))

    def _read_flags(self) -> list[str]:
        """Read our flags, and return the other words of the command line.

        At every parse: some releases and an in-process restart parse twice.
        """
        try:
            config, rest = flags.read(sys.argv[1:])
        except AdaptraError as error:
            flags.fail(error)
        self.config = None if self._refused else config
        if self._why == _NOT_READ:
            self._why = "no training has begun"
        return rest

    # The wrappers, as wrapt calls them, in the order in which a training program gets to them.

    def _parse_args(self, wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        self._read_flags()
        provider, rest = (
            (args[0], args[1:]) if args else (kwargs.pop("extra_args_provider", None), ())
        )
        return wrapped(flags.with_ours(provider), *rest, **kwargs)

    def _validate_args(self, wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        if self.config is not None:
            try:
                self._check(result if result is not None else args[0])
            except AdaptraError as error:
                flags.fail(error)
        return result

    def _check(self, args: Any) -> None:
        """Check the settings as far as possible before processes meet; end here after a dry run."""
        from megatron_adaptra.adapter.compat.profiles import profile
        from megatron_adaptra.adapter.shares.sources import fit
        from megatron_adaptra.emulate import worker_rules
        from megatron_adaptra.emulate.scenario import load_rules
        from megatron_adaptra.plan.reductions.sized import plan_in_file
        from megatron_adaptra.transport.engine.rails import disabled, fabric

        config = self.config
        assert config is not None
        flags.refuse(args)
        profile()
        if config.transport != "gloo" and not disabled(os.environ):
            fabric(os.environ)
        stages, replicas = args.pipeline_model_parallel_size, args.data_parallel_size
        load_rules(config.emulate_link, stages, replicas=replicas)
        worker_rules.load_slowness(config.emulate_worker, stages, replicas)
        slow = ", ".join(config.emulate_worker)
        if slow and (why := worker_rules.why_no_slowness(_job(args, config).device)):
            raise BadInput(worker_rules.FIELD, slow, why)
        ranks = replicas * getattr(args, "context_parallel_size", 1)
        plan_in_file(config.allreduce, ranks)
        if config.late and (config.late[-1] >= ranks or len(config.late) == ranks):
            allowed = f"data-parallel ranks are 0 to {ranks - 1}, of whom one has to be left"
            raise BadInput("--adaptra-late-ranks", config.late_ranks, allowed)
        if config.counts:
            each = args.global_batch_size // (args.micro_batch_size * replicas)
            if getattr(args, "step_batch_size_schedule", None):  # each step has another one
                each = sum(config.counts) // replicas
            fit(config.counts, replicas, each)
        job = _job(args, config)
        if args.adaptra_dry_run:
            from megatron_adaptra.adapter.entry.dry_run import show

            show(args, job)
            self._why = ""
            sys.exit(0)
        try:
            resolve(job)
        except UnsupportedMegatron as error:
            self._train_as_stock(error)

    def _setup(self, wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        """Activate the plugin, call `setup_model_and_optimizer`, and resume a checkpoint's plan."""
        if self.config is None or self.activation is not None:
            return wrapped(*args, **kwargs)
        self._activate()
        result = wrapped(*args, **kwargs)
        if self.activation is not None:
            from megatron.training import get_args

            from megatron_adaptra.adapter.entry import checkpoint, iteration_end

            self._next = self.session.iteration = int(get_args().iteration)
            self.session.guard.call(checkpoint.resume, self.session)
            self.activation.undo_with(iteration_end.attach(self.session, result).close)
        return result

    def _activate(self) -> None:
        from megatron.training import get_args

        from megatron_adaptra.adapter.entry.activate import activate

        assert self.config is not None
        try:
            self.activation = activate(self.config, program=True, clips=get_args().clip_grad > 0)
        except (UnsupportedBackend, UnsupportedMegatron) as error:
            self._train_as_stock(error)
            return
        except BadInput as error:  # gloo beside GPUs: only now it is known where ops run
            flags.fail(error)
        self._why = ""
        self.session.announce = True
        self.activation.undo_with(self.session.watchdog.end_on_signal())

    def _train_as_stock(self, error: AdaptraError) -> None:
        assert self.config is not None
        if self.config.strict:
            flags.fail(error)
        if os.environ.get("RANK", "0") == "0":
            log_line(f"WARNING: {GOES_ON} as stock Megatron: {error}")
        self.config, self._refused = None, True
        self._why = f"Megatron has trained as stock: {error}"

    def _train_step(self, wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        if self.session is None:
            return wrapped(*args, **kwargs)
        self._count_skipped()
        place = f"iteration {self.session.iteration}, outside the pipeline's messages"
        self.session.watchdog.begins(self.session.iteration, place)
        reruns = self.session.reruns

        def run() -> Any:
            result = wrapped(*args, **kwargs)
            if (collectives := self.session.small_collectives) is not None:
                collectives.wait_pending()  # of a step that has ended early
            return result

        result = run() if reruns is None else reruns.train(run)
        self.session.iteration_done()
        self.session.watchdog.calls += 1
        return result

    def _count_skipped(self) -> None:
        """Count iterations that Megatron has skipped, too, as its log does, on all ranks alike."""
        from megatron.training import get_args

        number = int(getattr(get_args(), "curr_iteration", self._next))
        self.session.iteration += max(0, number - self._next)
        self._next = number + 1

    def _training_log(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if (activation := self.activation) is None:
            return wrapped(*args, **kwargs)
        session = activation.session
        if not session.patches.uses("log"):
            return wrapped(*args, **kwargs)
        from megatron_adaptra.adapter.entry import training_log

        with contextlib.ExitStack() as stack:
            session.guard.call(training_log.lengthen_line, session, stack)
            stack.enter_context(session.logging())
            result = wrapped(*args, **kwargs)
        session.guard.call(training_log.write_scalars, activation, wrapped, args, kwargs)
        return result

    def _save_checkpoint(self, wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        if self.session is not None:
            dog = self.session.watchdog
            dog.begins(dog.iteration, f"a save after iteration {dog.iteration}")
        result = wrapped(*args, **kwargs)
        if self.session is not None:
            dog.begins(dog.iteration, f"what follows a save after iteration {dog.iteration}")
            self.session.guard.call(self._save_plan, wrapped, args, kwargs)
        return result

    def _save_plan(self, save: Any, args: Any, kwargs: Any) -> None:
        """Write our file into the checkpoint that a call of `save` has made."""
        from megatron_adaptra.adapter.entry import checkpoint

        given = {"iteration": args[0]} if args else kwargs
        with contextlib.suppress(TypeError, ValueError):  # it has no signature of Megatron's
            given = {**given, **inspect.signature(save).bind(*args, **kwargs).arguments}
        if not given.get("non_persistent_ckpt"):  # which Megatron deletes soon
            self.session.guard.later(checkpoint.save, self.session, given["iteration"])

    def _pretrain(self, wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        """Run the training; end the plugin with it, whether it returns, raises or exits."""
        try:
            return wrapped(*args, **kwargs)
        except Exception as error:
            # At once: closing takes time, and torchrun's SIGTERM may come before the traceback.
            if self.session is not None and (words := self.session.watchdog.failure_message(error)):
                log_line(words)
            raise
        finally:
            activation, self.activation, self.config = self.activation, None, None
            with self._stack:
                if activation is not None:
                    activation.undo()


def _job(args: Any, config: AdaptraConfig) -> Job:
    """Return the job that Megatron's validated arguments describe."""
    return Job(
        config,
        stages=args.pipeline_model_parallel_size,
        chunks=args.virtual_pipeline_model_parallel_size or 1,
        replicas=args.data_parallel_size,
        program=True,
        clips=args.clip_grad > 0,
        device=args.distributed_backend != "gloo",
    )


PLUGIN = Plugin()
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
    modules = {PATCHES[entry].targets[0].partition(":")[0] for entry in PLUGIN.wrappers}
    late = [name for name in sorted(modules) if name in sys.modules]
    if late:
        raise RuntimeError(f"call megatron_adaptra.register() before anything imports {late[0]}")
    _registered = True
    if _asks_for_gloo(sys.argv[1:]):
        _stand_in_for_cuda()
    for module in modules:
        wrapt.register_post_import_hook(PLUGIN.wrap, module)


def _asks_for_gloo(argv: list[str]) -> bool:
    """Return whether `argv` has `--distributed-backend gloo`, Megatron's for training on CPUs."""
    flag = "--distributed-backend"
    return f"{flag}=gloo" in argv or any(pair == (flag, "gloo") for pair in pairwise(argv))


def _stand_in_for_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        from megatron_adaptra.adapter.baseline import cpu

        cpu.install()
