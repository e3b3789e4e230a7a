"""Figure 3: fine-tuned accuracy over the size of the pre-training data."""

from vitkit.studies.study import Figure
from vitkit.studies.transfer import transfer_study

STUDY = transfer_study(
    name="fig3",
    title="Transfer over data size",
    paper="Figure 3",
    figure=Figure(
        column="top1", lines="model", x="upstream", log_x=True, x_label="Fraction of the pre-training images"
    ),
    paper_numbers={"BiT": "better with little pre-training data", "large ViT": "passes as data grows"},
)
