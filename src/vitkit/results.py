"""Results of public functions. Importing this module imports no torch."""

from typing import TYPE_CHECKING

from vitkit.core.lazy import lazy_attributes

if TYPE_CHECKING:
    from vitkit.core.result import Result
    from vitkit.data.summary import DataSummary
    from vitkit.data_quality.check import DataQualityReport
    from vitkit.evaluation.comparison import ComparedModel, ComparisonResult, Difference, ModelScores
    from vitkit.evaluation.evaluation import ConfusionPair, EvaluationResult, Mistake, RealAccuracy
    from vitkit.evaluation.fewshot import FewShotResult, ShotScore
    from vitkit.evaluation.leaderboard import Leaderboard
    from vitkit.evaluation.metrics import Calibration, ClassMetrics
    from vitkit.report.inspection import InspectionResult

__all__ = [
    "Calibration",
    "ClassMetrics",
    "ComparedModel",
    "ComparisonResult",
    "ConfusionPair",
    "DataQualityReport",
    "DataSummary",
    "Difference",
    "EvaluationResult",
    "FewShotResult",
    "InspectionResult",
    "Leaderboard",
    "Mistake",
    "ModelScores",
    "RealAccuracy",
    "Result",
    "ShotScore",
]

_HOMES = {
    "Calibration": "vitkit.evaluation.metrics",
    "ClassMetrics": "vitkit.evaluation.metrics",
    "ComparedModel": "vitkit.evaluation.comparison",
    "ComparisonResult": "vitkit.evaluation.comparison",
    "ConfusionPair": "vitkit.evaluation.evaluation",
    "DataQualityReport": "vitkit.data_quality.check",
    "DataSummary": "vitkit.data.summary",
    "Difference": "vitkit.evaluation.comparison",
    "EvaluationResult": "vitkit.evaluation.evaluation",
    "FewShotResult": "vitkit.evaluation.fewshot",
    "InspectionResult": "vitkit.report.inspection",
    "Leaderboard": "vitkit.evaluation.leaderboard",
    "Mistake": "vitkit.evaluation.evaluation",
    "ModelScores": "vitkit.evaluation.comparison",
    "RealAccuracy": "vitkit.evaluation.evaluation",
    "Result": "vitkit.core.result",
    "ShotScore": "vitkit.evaluation.fewshot",
}

__getattr__, __dir__ = lazy_attributes(globals(), _HOMES)
