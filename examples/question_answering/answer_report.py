"""What a run of `answer_questions.py` leaves to read: tables, what they mean, model cards, a picture."""

from typing import Any

from shared.task_run import results_table, smoothed

from hf_efficient_attn.pictures import new_figure
from question_answering.answer_arguments import AnswerTrainingArguments

COLUMNS = {
    "reads": ("model that reads", "{}"),
    "exact_match": ("exact match", "{:.1f}"),
    "f1": ("F1", "{:.1f}"),
    "within": ("answers within reach", "{:.0%}"),
    "questions_per_second": ("questions/s", "{:,.1f}"),
    "train_seconds": ("training (s)", "{:.1f}"),
    "num_steps": ("steps", "{:,}"),
    "train_tokens": ("tokens seen", "{:,}"),
    "train_examples": ("questions seen", "{:,}"),
    "peak": ("peak of a step (MiB)", "{:,.0f}"),
    "reload_difference": ("reload difference", "{:.1e}"),
}
POSITION_COLUMNS = {
    "where": ("answer begins at token", "{}"),
    "questions": ("questions", "{:,}"),
    "whole": ("F1, whole text", "{:.1f}"),
    "truncated": ("F1, truncated", "{:.1f}"),
}
COLORS = {"whole": "C0", "truncated": "C1"}


def results_text(content: dict[str, Any], training: AnswerTrainingArguments) -> str:
    """Return both tables and what to bear in mind."""
    data, models = content["data"], content["models"]
    rows = [{**result, "peak": result["training_step_peak_bytes"] / 2**20} for result in models.values()]
    parts = [
        f"Questions about {data['source']}: {data['train_questions']:,} to train on, {data['test_questions']:,} "
        f"to test on; question and text have {data['test_tokens_median']:,} tokens in the middle, at most "
        f"{data['test_tokens_longest']:,}.",
        results_table(COLUMNS, rows),
        results_table(POSITION_COLUMNS, position_rows(models)),
        "Exact match and F1 from 0 to 100, as SQuAD defines them. Both are one model of "
        f"{models['whole']['parameters']:,} parameters with sparse attention, global on the question, trained with "
        f"seed {training.seed} for {training.seconds_per_model:g} seconds at learning rate "
        f"{training.learning_rate:g} and {training.tokens_per_step:,} tokens a step; the truncated one is trained on "
        "the questions whose answer it can see, and asked all of them. Peak: memory of a training step on the "
        "largest batch, beyond the weights.",
        *([data["note"]] if data["note"] else []),
        *(f"{kind}: {result['stopped']}" for kind, result in models.items() if result["stopped"]),
    ]
    return "\n\n".join(parts)


def position_rows(models: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row for each stretch of the text in which answers begin, with the F1 of both models."""
    pairs = zip(*(models[kind]["by_position"] for kind in COLORS), strict=True)
    return [
        {
            "where": f"{whole['begin']:,} to {whole['end'] - 1:,}",
            "questions": whole["questions"],
            "whole": whole["f1"],
            "truncated": truncated["f1"],
        }
        for whole, truncated in pairs
    ]


def model_card(title: str, result: dict[str, Any], note: str | None) -> dict[str, str]:
    """Return the parts of a model's card; see `saved_model.save_model`."""
    return {
        "pipeline_tag": "question-answering",
        "title": f"Answers about {title}, reading {result['reads']}",
        "text": (
            f"An encoder of {result['parameters']:,} parameters with sparse attention, trained by "
            f"`examples/answer_questions.py` of `hf_efficient_attn` for {result['train_seconds']:.0f} seconds. On the "
            f"test questions: exact match {result['exact_match']:.1f}, F1 {result['f1']:.1f}."
        ),
        "usage": (
            "import torch\nfrom transformers import AutoModelForQuestionAnswering, AutoTokenizer\n\n"
            'tokenizer = AutoTokenizer.from_pretrained("{folder}")\n'
            'model = AutoModelForQuestionAnswering.from_pretrained("{folder}").eval()\n'
            'inputs = tokenizer("What is X?", "X: a letter.", truncation="only_second", return_tensors="pt")\n'
            'ids = inputs["input_ids"][0]\n'
            "first = ids.tolist().index(tokenizer.sep_token_id) + 1\n"
            "in_question = torch.isin(ids, ids[1 : first - 1])  # words of the question are marked in the text\n"
            "in_question[:first] = False\n"
            'inputs["token_type_ids"] = in_question[None].long()\n'
            "outputs = model(**inputs)\n"
            "start, end = int(outputs.start_logits.argmax()), int(outputs.end_logits.argmax())\n"
            "print(tokenizer.decode(ids[start : end + 1]))"
        ),
        "limits": f"A demonstration at a small size, trained briefly from random weights. {note or ''}".strip(),
    }


def draw_scores(models: dict[str, Any], losses: dict[str, list[tuple[float, float]]]) -> Any:
    """Return a figure of two panels: loss by training time, F1 by where in the text the answer begins."""
    figure = new_figure(11, 4.5)
    curve, bars = figure.subplots(1, 2)
    rows = position_rows(models)
    for index, (kind, color) in enumerate(COLORS.items()):
        label = f"reads {models[kind]['reads']}"
        curve.plot(*smoothed(losses[kind]), color=color, label=label)
        places = [place + 0.4 * index - 0.2 for place in range(len(rows))]
        bars.bar(places, [row[kind] for row in rows], width=0.4, color=color, label=label)
    curve.set_xlabel("training time (s)")
    curve.set_ylabel("training loss (nats), smoothed")
    curve.legend()
    names = [row["where"].replace(" to ", "\nto ") + f"\n{row['questions']} questions" for row in rows]
    bars.set_xticks(range(len(rows)), names, fontsize="x-small")
    bars.set_xlabel("token at which the answer begins")
    bars.set_ylabel("F1 on the test questions")
    bars.set_ylim(0, 100)
    bars.legend()
    figure.suptitle("Answers in a long text: one sparse encoder, whole text or its start, equal training time")
    return figure
