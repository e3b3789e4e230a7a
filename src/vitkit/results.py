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
    "vitkit.api.run": "History Run",
    "vitkit.core.cache_dir": "CacheInfo",
    "vitkit.core.names": "NameList",
    "vitkit.core.result": "Result",
    "vitkit.data.summary": "DataSummary",
    "vitkit.data.verify": "BadFile",
    "vitkit.data_quality.check": "DataQualityReport",
    "vitkit.evaluation.comparison": "ComparedModel ComparisonResult Difference ModelScores",
    "vitkit.evaluation.evaluation": "EvaluationResult Mistake RealAccuracy",
    "vitkit.evaluation.fewshot": "FewShotResult ShotScore",
    "vitkit.evaluation.leaderboard": "Leaderboard",
    "vitkit.evaluation.metrics": "Calibration ClassMetrics Confusion",
    "vitkit.exporters.exporter": "ExportResult",
    "vitkit.inference.agreement": "Agreement",
    "vitkit.inference.benchmark": "BenchmarkResult BenchmarkRow",
    "vitkit.inference.machine": "MachineReport",
    "vitkit.inference.predictions": "ImagePrediction Prediction Predictions",
    "vitkit.report.inspection": "InspectionResult",
    "vitkit.server.background": "Server",
    "vitkit.studies.runner": "StudyResult",
    "vitkit.weights.adapt": "AdaptResult",
    "vitkit.weights.convert": "ConversionResult",
    "vitkit.weights.describe": "TensorDifference WeightsDiff WeightsInfo",
    "vitkit.weights.verify": "VerificationResult",
    "vitkit.zoo.cost": "Cost Table6 Table6Row",
}

__getattr__, __dir__ = lazy_attributes(globals(), _HOMES)
