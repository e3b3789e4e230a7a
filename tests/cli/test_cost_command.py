"""`vitkit cost`: cost of a model and a run, and Table 6."""

import json

import pytest

from vitkit.cli.main import main
from vitkit.zoo.cost import count_table6


def run_cost(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["cost", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_run_of_table_6_matches_the_paper(capsys):
    cost = run_cost(capsys, "B/16", "--images", "303e6", "--epochs", "7")
    assert cost["parameters"] == 86_567_656
    assert cost["train_gflops"] == pytest.approx(3 * cost["forward_gflops"])
    assert cost["exaflops"] == pytest.approx(224, rel=0.025)
    assert sum(cost["parts_gflops"].values()) == pytest.approx(cost["forward_gflops"])


def test_no_exaflops_without_images(capsys):
    assert run_cost(capsys, "Ti/16")["exaflops"] is None


def test_cost_grows_with_image_size(capsys):
    small, large = run_cost(capsys, "Ti/16"), run_cost(capsys, "Ti/16", "--image-size", "384")
    assert large["image_size"] == 384
    assert large["forward_gflops"] > 2.9 * small["forward_gflops"]  # 577 tokens to 197, and attention grows faster
    assert large["activation_bytes_per_image"] > 2.9 * small["activation_bytes_per_image"]


def test_image_size_is_height_by_width(capsys):
    assert run_cost(capsys, "Ti/16", "--image-size", "224x320")["image_size"] == [224, 320]


def test_training_memory_grows_with_batch_size(capsys):
    one, nine = run_cost(capsys, "Ti/16"), run_cost(capsys, "Ti/16", "--batch-size", "9")
    assert nine["training_bytes"] - one["training_bytes"] == 8 * one["activation_bytes_per_image"]
    assert one["weight_bytes"] == 4 * 5_717_416


def test_settings_change_the_model(capsys):
    plain, relative = run_cost(capsys, "Ti/16"), run_cost(capsys, "Ti/16", "positions.kind=relative")
    assert relative["parameters"] > plain["parameters"]


def test_table_6_is_complete(capsys):
    assert main(["cost", "--table6", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["model"], row["epochs"]) for row in rows] == [(row.model, row.epochs) for row in count_table6().rows]
    assert main(["cost", "--table6"]) == 0
    assert "4258.0" in capsys.readouterr().out


def test_output_shows_parts_and_run(capsys):
    assert main(["cost", "B/32", "--images", "1281167", "--epochs", "300"]) == 0
    output = capsys.readouterr().out
    for words in ("88,224,232", "mlp", "exaFLOPs", "weights", "activations"):
        assert words in output


@pytest.mark.parametrize(
    ("arguments", "code", "error", "hint"),
    [
        (["L/61"], 1, "unknown model L/61", "did you mean L/16?"),
        (["B/16", "--image-size", "225"], 1, "the patch does not divide the image", "224×224"),
        (["B/16", "--image-size", "big"], 2, "'big' is not a size", "vitkit cost --help"),
        (["B/16", "--images", "many"], 2, "'many' is not a number of images", "vitkit cost --help"),
        (["B/16", "--images", "1.5"], 2, "'1.5' is not a number of images", "vitkit cost --help"),
        (["B/16", "heads=7"], 1, "the heads do not divide the width", "heads=12"),
        (["B/16", "positions.kind=polar"], 1, "positions.kind", ""),
        (["B/16", "positons.kind=none"], 1, "positons", "did you mean positions"),
        (["R50x1", "patch_size=8"], 1, "patch_size is not a known key", ""),
        ([], 2, "give either a model", "vitkit cost --help"),
        (["B/16", "--table6"], 2, "--table6 alone", "vitkit cost --help"),
        (["B/16", "--epochs", "7"], 2, "--images", "vitkit cost --help"),
    ],
)
def test_mistake_gives_one_error_and_one_hint(capsys, arguments, code, error, hint):
    assert main(["cost", *arguments]) == code
    output = capsys.readouterr()
    lines = output.err.splitlines()
    assert output.out == ""
    assert lines[0].startswith("error: ")
    assert error in lines[0]
    assert len(lines) <= 2
    assert hint in "".join(lines[1:])
