"""Names that users of other libraries give to arguments and settings, and what they are called here."""

from collections.abc import Collection
from pkgutil import resolve_name

from vitkit.core.config import find_keys

SYNONYMS = {
    "data": ("dataset", "train_dataset", "train_data", "data_dir", "root"),
    "images": ("image", "inputs", "files"),
    "num_classes": ("classes", "n_classes", "nb_classes", "num_labels"),
    "image_size": ("img_size", "imgsz", "input_size", "size", "resolution"),
    "channels": ("in_chans", "in_channels", "num_channels"),
    "patch_size": ("patch",),
    "pretrained": ("weights", "checkpoint_path"),
    "init": ("weights", "pretrained", "from_", "checkpoint", "start"),
    "top": ("top_k", "topk", "k"),
    "lr": ("learning_rate", "lr0"),
    "batch_size": ("batch", "bs", "batch_sizes", "per_device_train_batch_size"),
    "epochs": ("num_epochs", "num_train_epochs", "max_epochs"),
    "steps": ("max_steps",),
    "workers": ("num_workers", "n_jobs"),
    "minutes": ("time_limit", "time", "max_time"),
    "out": ("output", "output_dir", "out_dir", "save_dir", "project", "name"),
    "to": ("format",),
    "overwrite": ("force", "exist_ok"),
    "settings": ("config", "overrides", "hyperparameters", "cfg"),
    "trainable": ("freeze", "tune"),
    "only": ("sections",),
    "target": ("class_", "label", "class_name"),
    "model": ("name", "arch", "weights", "model_name"),
    "source": ("path", "checkpoint", "weights", "model_name", "pretrained_model_name_or_path"),
    "labels": ("class_names", "names"),
    "method": ("classifier",),
    "shots": ("n_shots", "k_shot"),
    "seed": ("random_state", "random_seed"),
    "callbacks": ("callback",),
    "progress": ("verbose", "show_progress", "progress_bar"),
    "device": ("map_location", "device_map"),
    "dtype": ("torch_dtype",),
    "pattern": ("filter",),
}
"""Other names that people try, by the name of the argument."""

INSTEAD_OF_TRUE = {"pretrained": 'init="auto"', "freeze": 'trainable="head"'}
"""Arguments for names that are true or false elsewhere."""

SETTING_SYNONYMS = {
    "width": ("embed_dim", "hidden_size", "hidden_dim"),
    "depth": ("num_layers", "num_hidden_layers"),
    "heads": ("num_heads", "num_attention_heads"),
    "mlp_dim": ("intermediate_size",),
    "pooling": ("global_pool",),
    "activation": ("act_layer", "hidden_act"),
    "layer_scale": ("init_values",),
    "registers": ("reg_tokens",),
    "dense": ("drop_rate", "dropout", "hidden_dropout_prob"),
    "stochastic_depth": ("drop_path_rate", "drop_path"),
    "smoothing": ("label_smoothing", "label_smoothing_factor"),
    "clip": ("clip_grad", "max_grad_norm", "gradient_clip_val"),
    "accumulate": ("gradient_accumulation_steps", "accumulate_grad_batches"),
    "val_fraction": ("val_split", "validation_split", "valid_pct"),
    "save_every": ("save_steps", "save_interval"),
    "every": ("eval_steps", "eval_every"),
    "log_every": ("logging_steps", "log_interval"),
    "precision": ("fp16", "bf16", "amp", "mixed_precision"),
    "optimizer.name": ("optimizer", "optim", "opt"),
    "warmup_steps": ("warmup", "warmup_epochs", "warmup_ratio"),
}
"""Other names of settings, by the last part of the key."""

MODEL, RUN = "vitkit.model.config:ViTConfig", "vitkit.training.config:RunConfig"
RUNS = ("train", "finetune", "suite", "study")
"""Functions whose settings are those of runs."""
CONFIGS = dict.fromkeys(("create", "cost", "convert", "export"), (MODEL,)) | dict.fromkeys(RUNS, (RUN, MODEL))
"""Configurations that have the settings of each function."""
MAX_VALUE = 40
"""Longest value that is repeated in a hint."""

ELSEWHERE = {
    "features_only": "use model.forward_intermediates(images)",
    "output_hidden_states": "use model.forward_intermediates(images)",
    "output_attentions": "use model.attention(images)",
    "revision": 'add it to the name: "hub:owner/name@revision"',
    "resume": "the same call again resumes an interrupted run",
    "resume_from_checkpoint": "the same call again resumes an interrupted run",
    "ckpt_path": "the same call again resumes an interrupted run",
    "val_data": 'use directories train/ and val/, or data={"train": pairs, "val": pairs}',
    "eval_dataset": 'use directories train/ and val/, or data={"train": pairs, "val": pairs}',
    "devices": "use torchrun --nproc-per-node N script.py",
    "gpus": "use torchrun --nproc-per-node N script.py",
}
"""Hints for what is not an argument of any function."""

ELSEWHERE_BY_FUNCTION = {
    "load": {
        "pretrained": "vitkit.create(name) makes a model without pretrained weights",
        "num_classes": "use vitkit.create(name, pretrained=source, num_classes=…)",
        "image_size": "use vitkit.adapt(source, image_size=…).model",
        "patch_size": "use vitkit.adapt(source, patch_size=…).model",
        "channels": "use vitkit.adapt(source, channels=…).model",
    },
    "train": {"num_classes": "the labels of the images decide the classes"},
    "finetune": {"num_classes": "the labels of the images decide the classes"},
    "evaluate": {"metrics": "the result has top1, top5, ece, nll, per_class and confusion"},
}
"""Hints for arguments that other functions have."""


def find_hint(function: str, name: str, value: object, arguments: Collection[str]) -> str | None:
    """Return what to use instead of an argument that a function does not have.

    >>> find_hint("create", "classes", 10, ["num_classes"])
    'use num_classes=10'
    >>> find_hint("train", "weight_decay", 0.1, ["lr", "settings"])
    'use settings={"optimizer.weight_decay": 0.1}'
    """
    meant = [argument for argument, others in SYNONYMS.items() if name in others]
    here = [argument for argument in meant if argument in arguments]
    if here and value is True and name in INSTEAD_OF_TRUE:
        return f"use {INSTEAD_OF_TRUE[name]}"
    if here:
        return f"use {here[0]}={shorten(value)}"
    elsewhere = ELSEWHERE | ELSEWHERE_BY_FUNCTION.get(function, {})
    hints = [elsewhere[each] for each in (name, *meant) if each in elsewhere]
    if not hints and "settings" in arguments and (setting := find_setting(function, name, value)):
        hints = [f"use {setting}"]
    return hints[0] if hints else None


def find_setting(function: str, name: str, value: object) -> str | None:
    """Return the argument that sets what a name means by a setting; those of the model are one setting of a run."""
    names = [name, *(key for key, others in SETTING_SYNONYMS.items() if name in others)]
    text = shorten(value) if names == [name] or not isinstance(value, bool | str) else "…"
    for config in CONFIGS.get(function, ()):
        keys = [key for each in names for key in find_keys(resolve_name(config), each)]
        if keys and function in RUNS and config == MODEL:
            return f'settings={{"model.settings": ["{keys[0]}={text}"]}}'
        if keys:
            return f'settings={{"{keys[0]}": {text}}}'
    return None


def shorten(value: object) -> str:
    """Return a value if it is short enough for a hint."""
    text = repr(value)
    return text if len(text) <= MAX_VALUE else "…"
