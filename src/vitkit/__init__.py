"""Vision Transformers of "An Image is Worth 16x16 Words": train, evaluate, inspect, convert and serve.

>>> import vitkit
>>> model = vitkit.create("B/16", num_classes=10, device="meta")
>>> vitkit.list_models("L/*")
['L/16', 'L/32']
"""

from typing import TYPE_CHECKING

from vitkit.core.lazy import lazy_attributes

if TYPE_CHECKING:
    from vitkit.api.comparison import compare
    from vitkit.api.data import check_data, check_data_quality
    from vitkit.api.deployment import benchmark, export, serve
    from vitkit.api.evaluation import evaluate, fewshot
    from vitkit.api.inspection import inspect
    from vitkit.api.listing import cost, list_models, list_recipes, table6
    from vitkit.api.models import adapt, convert, create, describe_weights, diff_weights, load, save, verify
    from vitkit.api.prediction import predict
    from vitkit.api.run import Run
    from vitkit.api.studies import list_studies, study
    from vitkit.api.system import cache_info, clear_cache, doctor
    from vitkit.api.training import demo, finetune, recipe, suite, train
    from vitkit.core.errors import VitkitError, VitkitWarning
    from vitkit.core.signals import Interrupted
    from vitkit.core.version import __version__
    from vitkit.data.preprocessing import Preprocessing
    from vitkit.inference.predictor import Predictor
    from vitkit.model.config import BiTConfig, ViTConfig
    from vitkit.model.encoder import Capture
    from vitkit.model.resnet import BiT
    from vitkit.model.vit import ViT
    from vitkit.training.callbacks import Callback
    from vitkit.training.config import RunConfig

__all__ = [
    "BiT",
    "BiTConfig",
    "Callback",
    "Capture",
    "Interrupted",
    "Predictor",
    "Preprocessing",
    "Run",
    "RunConfig",
    "ViT",
    "ViTConfig",
    "VitkitError",
    "VitkitWarning",
    "__version__",
    "adapt",
    "benchmark",
    "cache_info",
    "check_data",
    "check_data_quality",
    "clear_cache",
    "compare",
    "convert",
    "cost",
    "create",
    "demo",
    "describe_weights",
    "diff_weights",
    "doctor",
    "evaluate",
    "export",
    "fewshot",
    "finetune",
    "inspect",
    "list_models",
    "list_recipes",
    "list_studies",
    "load",
    "predict",
    "recipe",
    "save",
    "serve",
    "study",
    "suite",
    "table6",
    "train",
    "verify",
]

# `import vitkit` imports no torch: each name is imported from its home when it is first used.
_HOMES = {
    "vitkit.api.comparison": "compare",
    "vitkit.api.data": "check_data check_data_quality",
    "vitkit.api.deployment": "benchmark export serve",
    "vitkit.api.evaluation": "evaluate fewshot",
    "vitkit.api.inspection": "inspect",
    "vitkit.api.listing": "cost list_models list_recipes table6",
    "vitkit.api.models": "adapt convert create describe_weights diff_weights load save verify",
    "vitkit.api.prediction": "predict",
    "vitkit.api.run": "Run",
    "vitkit.api.studies": "list_studies study",
    "vitkit.api.system": "cache_info clear_cache doctor",
    "vitkit.api.training": "demo finetune recipe suite train",
    "vitkit.core.errors": "VitkitError VitkitWarning",
    "vitkit.core.signals": "Interrupted",
    "vitkit.core.version": "__version__",
    "vitkit.data.preprocessing": "Preprocessing",
    "vitkit.inference.predictor": "Predictor",
    "vitkit.model.config": "BiTConfig ViTConfig",
    "vitkit.model.encoder": "Capture",
    "vitkit.model.resnet": "BiT",
    "vitkit.model.vit": "ViT",
    "vitkit.training.callbacks": "Callback",
    "vitkit.training.config": "RunConfig",
}

_HINTS = {
    "AutoImageProcessor": "vitkit.load(source).preprocess",
    "AutoModel": "vitkit.load(source)",
    "AutoModelForImageClassification": "vitkit.load(source)",
    "DataLoader": "torch.utils.data.DataLoader with model.transforms(train=True)",
    "Dataset": "vitkit.train(data) with a path or pairs of image and label",
    "Learner": "vitkit.train(data)",
    "Model": "vitkit.create(name)",
    "Trainer": "vitkit.train(data), or vitkit.create(name) in a loop of your own",
    "ViTForImageClassification": "vitkit.load(source)",
    "ViTImageProcessor": "vitkit.load(source).preprocess",
    "ViTModel": "vitkit.load(source)",
    "VisionTransformer": "vitkit.ViT",
    "attention": "vitkit.inspect(model, images), or model.attention(images)",
    "bench": "vitkit.benchmark(model)",
    "convert_weights": "vitkit.convert(source, path, to=format)",
    "create_model": "vitkit.create(name)",
    "create_transform": "model.transforms()",
    "download": "vitkit.load('hub:owner/name')",
    "eval": "vitkit.evaluate(model, data)",
    "explain": "vitkit.inspect(model, images)",
    "fine_tune": "vitkit.finetune(model, data)",
    "fit": "vitkit.train(data)",
    "from_pretrained": "vitkit.load(source)",
    "get_model": "vitkit.create(name)",
    "info": "vitkit.describe_weights(source), or vitkit.cost(name)",
    "list_pretrained": "vitkit.list_models(pretrained=True)",
    "load_model": "vitkit.load(source)",
    "models": "vitkit.list_models()",
    "pipeline": "vitkit.Predictor(model)",
    "quantize": 'vitkit.predict(model, images, precision="int8")',
    "recipes": "vitkit.list_recipes()",
    "save_model": "vitkit.save(model, path)",
    "save_pretrained": "vitkit.save(model, path)",
    "score": "vitkit.evaluate(model, data)",
    "set_seed": "vitkit.train(data, seed=0), or torch.manual_seed(0)",
    "summary": "vitkit.cost(name)",
    "test": "vitkit.evaluate(model, data)",
    "train_model": "vitkit.train(data)",
    "transforms": "model.transforms()",
    "val": "vitkit.evaluate(model, data)",
    "visualize": "vitkit.inspect(model, images)",
    "vit_base_patch16_224": "vitkit.create('vit_base_patch16_224')",
}
"""Names that users of other libraries try."""

__getattr__, __dir__ = lazy_attributes(
    globals(), _HOMES, hints=_HINTS, modules=("errors", "inspection", "results", "typing")
)
