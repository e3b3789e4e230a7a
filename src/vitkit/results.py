"""Results of public functions. Importing this module imports no torch."""

from typing import TYPE_CHECKING

from vitkit.core.lazy import lazy_attributes

if TYPE_CHECKING:
    from vitkit.api.run import History, Run
    from vitkit.core.cache_dir import CacheInfo
    from vitkit.core.names import NameList
    from vitkit.core.result import Result
    from vitkit.data.summary import DataSummary
    from vitkit.data.verify import BadFile
    from vitkit.data_quality.check import DataQualityReport
    from vitkit.evaluation.comparison import ComparedModel, ComparisonResult, Difference, ModelScores
    from vitkit.evaluation.evaluation import EvaluationResult, Mistake, RealAccuracy
    from vitkit.evaluation.fewshot import FewShotResult, ShotScore
    from vitkit.evaluation.leaderboard import Leaderboard
    from vitkit.evaluation.metrics import Calibration, ClassMetrics, Confusion
    from vitkit.exporters.exporter import ExportResult
    from vitkit.inference.agreement import Agreement
    from vitkit.inference.benchmark import BenchmarkResult, BenchmarkRow
    from vitkit.inference.machine import MachineReport
    from vitkit.inference.predictions import ImagePrediction, Prediction, Predictions
    from vitkit.report.inspection import InspectionResult
    from vitkit.server.background import Server
    from vitkit.studies.runner import StudyResult
    from vitkit.weights.adapt import AdaptResult
    from vitkit.weights.convert import ConversionResult
    from vitkit.weights.describe import TensorDifference, WeightsDiff, WeightsInfo
    from vitkit.weights.verify import VerificationResult
    from vitkit.zoo.cost import Cost, Table6, Table6Row

__all__ = [
    "AdaptResult",
    "Agreement",
    "BadFile",
    "BenchmarkResult",
    "BenchmarkRow",
    "CacheInfo",
    "Calibration",
    "ClassMetrics",
    "ComparedModel",
    "ComparisonResult",
    "Confusion",
    "ConversionResult",
    "Cost",
    "DataQualityReport",
    "DataSummary",
    "Difference",
    "EvaluationResult",
    "ExportResult",
    "FewShotResult",
    "History",
    "ImagePrediction",
    "InspectionResult",
    "Leaderboard",
    "MachineReport",
    "Mistake",
    "ModelScores",
    "NameList",
    "Prediction",
    "Predictions",
    "RealAccuracy",
    "Result",
    "Run",
    "Server",
    "ShotScore",
    "StudyResult",
    "Table6",
    "Table6Row",
    "TensorDifference",
    "VerificationResult",
    "WeightsDiff",
    "WeightsInfo",
]

_HOMES = {
    "AdaptResult": "vitkit.weights.adapt",
    "Agreement": "vitkit.inference.agreement",
    "BadFile": "vitkit.data.verify",
    "BenchmarkResult": "vitkit.inference.benchmark",
    "BenchmarkRow": "vitkit.inference.benchmark",
    "CacheInfo": "vitkit.core.cache_dir",
    "Calibration": "vitkit.evaluation.metrics",
    "ClassMetrics": "vitkit.evaluation.metrics",
    "ComparedModel": "vitkit.evaluation.comparison",
    "ComparisonResult": "vitkit.evaluation.comparison",
    "Confusion": "vitkit.evaluation.metrics",
    "ConversionResult": "vitkit.weights.convert",
    "Cost": "vitkit.zoo.cost",
    "DataQualityReport": "vitkit.data_quality.check",
    "DataSummary": "vitkit.data.summary",
    "Difference": "vitkit.evaluation.comparison",
    "EvaluationResult": "vitkit.evaluation.evaluation",
    "ExportResult": "vitkit.exporters.exporter",
    "FewShotResult": "vitkit.evaluation.fewshot",
    "History": "vitkit.api.run",
    "ImagePrediction": "vitkit.inference.predictions",
    "InspectionResult": "vitkit.report.inspection",
    "Leaderboard": "vitkit.evaluation.leaderboard",
    "MachineReport": "vitkit.inference.machine",
    "Mistake": "vitkit.evaluation.evaluation",
    "ModelScores": "vitkit.evaluation.comparison",
    "NameList": "vitkit.core.names",
    "Prediction": "vitkit.inference.predictions",
    "Predictions": "vitkit.inference.predictions",
    "RealAccuracy": "vitkit.evaluation.evaluation",
    "Result": "vitkit.core.result",
    "Run": "vitkit.api.run",
    "Server": "vitkit.server.background",
    "ShotScore": "vitkit.evaluation.fewshot",
    "StudyResult": "vitkit.studies.runner",
    "Table6": "vitkit.zoo.cost",
    "Table6Row": "vitkit.zoo.cost",
    "TensorDifference": "vitkit.weights.describe",
    "VerificationResult": "vitkit.weights.verify",
    "WeightsDiff": "vitkit.weights.describe",
    "WeightsInfo": "vitkit.weights.describe",
}

__getattr__, __dir__ = lazy_attributes(globals(), _HOMES)
