"""Table 5: fine-tuned accuracy on every downstream set, by pre-training data."""

from vitkit.studies.study import Figure
from vitkit.studies.transfer import transfer_study

STUDY = transfer_study(
    name="table5",
    title="Transfer to every dataset",
    paper="Table 5",
    figure=Figure(column="top1", lines="upstream", rows=("model", "dataset")),
    paper_numbers={
        "cifar10": "99.42 % after JFT-300M, 99.15 % after ImageNet-21k (L/16, Table 2)",
        "cifar100": "93.90 % after JFT-300M, 93.25 % after ImageNet-21k (L/16, Table 2)",
        "pets": "97.32 % after JFT-300M, 94.67 % after ImageNet-21k (L/16, Table 2)",
    },
)
