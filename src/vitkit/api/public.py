"""Wrapper of public functions: limits threads, and explains wrong arguments and a lack of memory."""

import functools
import inspect
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from vitkit.core.environment import limit_threads
from vitkit.core.errors import ArgumentError, VitkitError, did_you_mean

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

SYNONYMS = {
    "num_classes": ("classes", "n_classes", "nb_classes", "num_labels"),
    "image_size": ("img_size", "imgsz", "input_size", "size", "resolution"),
    "channels": ("in_chans", "in_channels", "num_channels"),
    "patch_size": ("patch",),
    "pretrained": ("weights", "checkpoint_path"),
    "init": ("weights", "pretrained", "from_", "checkpoint", "start"),
    "top": ("top_k", "topk", "k"),
    "lr": ("learning_rate", "lr0"),
    "batch_size": ("batch", "bs", "per_device_train_batch_size"),
    "epochs": ("num_epochs", "num_train_epochs", "max_epochs"),
    "steps": ("max_steps",),
    "workers": ("num_workers", "n_jobs"),
    "minutes": ("time_limit", "time", "max_time"),
    "out": ("output", "output_dir", "out_dir", "save_dir", "project"),
    "to": ("format",),
    "overwrite": ("force", "exist_ok"),
    "settings": ("config", "overrides", "hyperparameters", "cfg"),
    "trainable": ("freeze", "tune"),
    "only": ("sections",),
    "target": ("class_", "label", "class_name"),
    "model": ("name", "arch", "weights", "model_name"),
    "labels": ("class_names", "names"),
    "method": ("classifier",),
    "shots": ("n_shots", "k_shot"),
    "seed": ("random_state", "random_seed"),
    "callbacks": ("callback",),
    "progress": ("verbose", "show_progress", "progress_bar"),
}
"""Other names that people try, by the name of the argument."""


def public(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Check the arguments of each call, raise an `ArgumentError` that names the right one, and limit torch's threads.

    >>> @public
    ... def create(name: str, *, num_classes: int = 1000) -> int:
    ...     return num_classes
    >>> create("B/16", classes=10)
    Traceback (most recent call last):
    vitkit.core.errors.ArgumentError: create() has no argument 'classes'
    hint: use num_classes=10
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        for name, value in kwargs.items():
            if name not in signature.parameters:
                hint = suggest_argument(name, value, signature)
                raise ArgumentError(f"{function.__name__}() has no argument {name!r}", hint=hint)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            hint = f"the signature is {function.__name__}{_short(signature)}"
            raise ArgumentError(f"{function.__name__}(): {error}", hint=hint) from None
        limit_threads()
        try:
            return function(*args, **kwargs)
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and not re.search("can't allocate memory|out of memory", str(error)):
                raise
            amount = re.search(r"allocate ([\d.]+ \w+)", str(error))
            hint = "use a smaller model, image size or batch size, or a machine with more memory"
            raise VitkitError("out of memory", got=amount and f"a request for {amount[1]}", hint=hint) from error

    return checked


def suggest_argument(name: str, value: object, signature: inspect.Signature) -> str:
    """Return the hint for an unknown argument: the one that was meant, or all of them."""
    meant = [argument for argument, others in SYNONYMS.items() if name in others and argument in signature.parameters]
    if meant:
        text = repr(value)
        return f"use {meant[0]}={text}" if len(text) <= 40 else f"use {meant[0]}="
    return did_you_mean(name, signature.parameters) or f"the arguments are {', '.join(signature.parameters)}"


def _short(signature: inspect.Signature) -> str:
    """Format a signature without types and defaults."""
    empty = inspect.Parameter.empty
    parameters = [each.replace(annotation=empty, default=empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
