"""Results of public functions. Importing this module imports no torch."""

from typing import TYPE_CHECKING

from vitkit.core.lazy import lazy_attributes

if TYPE_CHECKING:
    from vitkit.core.names import NameList
    from vitkit.core.result import Result
    from vitkit.data.summary import DataSummary
    from vitkit.data_quality.check import DataQualityReport
    from vitkit.evaluation.comparison import ComparedModel, ComparisonResult, Difference, ModelScores
    from vitkit.evaluation.evaluation import ConfusionPair, EvaluationResult, Mistake, RealAccuracy
    from vitkit.evaluation.fewshot import FewShotResult, ShotScore
    from vitkit.evaluation.leaderboard import Leaderboard
    from vitkit.evaluation.metrics import Calibration, ClassMetrics
    from vitkit.report.inspection import InspectionResult
    from vitkit.weights.adapt import AdaptResult
    from vitkit.weights.convert import ConversionResult
    from vitkit.weights.describe import TensorDifference, WeightsDiff, WeightsInfo
    from vitkit.weights.verify import VerificationResult
    from vitkit.zoo.cost import Cost, Table6, Table6Row

__all__ = [
    "AdaptResult",
    "Calibration",
    "ClassMetrics",
    "ComparedModel",
    "ComparisonResult",
    "ConfusionPair",
    "ConversionResult",
    "Cost",
    "DataQualityReport",
    "DataSummary",
    "Difference",
    "EvaluationResult",
    "FewShotResult",
    "InspectionResult",
    "Leaderboard",
    "Mistake",
    "ModelScores",
    "NameList",
    "RealAccuracy",
    "Result",
    "ShotScore",
    "Table6",
    "Table6Row",
    "TensorDifference",
    "VerificationResult",
    "WeightsDiff",
    "WeightsInfo",
]

_HOMES = {
    "AdaptResult": "vitkit.weights.adapt",
    "Calibration": "vitkit.evaluation.metrics",
    "ClassMetrics": "vitkit.evaluation.metrics",
    "ComparedModel": "vitkit.evaluation.comparison",
    "ComparisonResult": "vitkit.evaluation.comparison",
    "ConfusionPair": "vitkit.evaluation.evaluation",
    "ConversionResult": "vitkit.weights.convert",
    "Cost": "vitkit.zoo.cost",
    "DataQualityReport": "vitkit.data_quality.check",
    "DataSummary": "vitkit.data.summary",
    "Difference": "vitkit.evaluation.comparison",
    "EvaluationResult": "vitkit.evaluation.evaluation",
    "FewShotResult": "vitkit.evaluation.fewshot",
    "InspectionResult": "vitkit.report.inspection",
    "Leaderboard": "vitkit.evaluation.leaderboard",
    "Mistake": "vitkit.evaluation.evaluation",
    "ModelScores": "vitkit.evaluation.comparison",
    "NameList": "vitkit.core.names",
    "RealAccuracy": "vitkit.evaluation.evaluation",
    "Result": "vitkit.core.result",
    "ShotScore": "vitkit.evaluation.fewshot",
    "Table6": "vitkit.zoo.cost",
    "Table6Row": "vitkit.zoo.cost",
    "TensorDifference": "vitkit.weights.describe",
    "VerificationResult": "vitkit.weights.verify",
    "WeightsDiff": "vitkit.weights.describe",
    "WeightsInfo": "vitkit.weights.describe",
}

__getattr__, __dir__ = lazy_attributes(globals(), _HOMES)
