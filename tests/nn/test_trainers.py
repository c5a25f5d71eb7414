"""The trainers of Transformers and TRL train integers, and continue after they are killed."""

import copy
import random

import pytest
import tiny
import torch
from states import assert_same

import arbcli

pytest.importorskip("accelerate", reason="needs the extra `trainers`")


class Killed(Exception):
    pass


def test_killed_trainer_continues_to_the_same_integers(transformers, tmp_path):
    """With activation checkpoints, a cosine and four micro-batches; every third step has three."""

    class Kill(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 3:
                raise Killed

    rows = [{"input_ids": row, "labels": row} for row in tiny.batch(11, 12)]

    def run(folder, callbacks=(), resume=None):
        model = tiny.build("qwen3")
        optimizer = arbcli.to_integers(model, lr=0.1, accumulation=4)
        schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 1, 4)
        settings = transformers.TrainingArguments(
            folder, per_device_train_batch_size=1, gradient_accumulation_steps=4, max_steps=4,
            save_steps=2, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
            eval_strategy="steps", eval_steps=3, gradient_checkpointing=True,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model, settings, train_dataset=rows, eval_dataset=rows[:2],
            optimizers=(optimizer, schedule), callbacks=[*callbacks],
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return model, trainer

    whole, trainer = run(tmp_path / "whole")
    rates = [record["learning_rate"] for record in trainer.state.log_history if "loss" in record]
    assert len(set(rates)) == 4
    with pytest.raises(Killed):
        run(tmp_path / "killed", [Kill()])
    resumed, _ = run(tmp_path / "killed", resume=True)
    wanted = whole.state_dict()
    assert_same(resumed.state_dict(), wanted)
    fresh = tiny.build("qwen3")
    arbcli.to_integers(fresh)
    assert not all(torch.equal(value, wanted[name]) for name, value in fresh.state_dict().items())


def test_dpo_raises_the_margin_of_the_model_alone_and_sft_steps_it(transformers, tmp_path):
    trl = pytest.importorskip("trl", reason="needs the extra `trainers`")
    datasets = pytest.importorskip("datasets", reason="needs the extra `trainers`")
    tokenizer = tiny.tokenizer()
    draw = random.Random(0)
    prompts = [" ".join(f"w{draw.randint(3, 95)}" for _ in range(4)) + " " for _ in range(16)]
    chosen, rejected = "w10 w11 w12", "w20 w21 w22"
    settings = {
        "per_device_train_batch_size": 4, "max_steps": 8, "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "save_strategy": "no", "bf16": False, "max_length": 32,
        "gradient_checkpointing": True,
    }  # fmt: skip

    @torch.no_grad()
    def margin(model) -> float:
        """Return by how much likelier the chosen answer is, in nats."""
        model.eval()
        totals = []
        for answer in (chosen, rejected):
            ids = torch.tensor(tokenizer([prompt + answer for prompt in prompts])["input_ids"])
            log_probabilities = model(ids).logits[:, -4:-1].log_softmax(-1)
            totals.append(log_probabilities.gather(2, ids[:, -3:, None]).sum() / len(prompts))
        return float(totals[0] - totals[1])

    model = tiny.build("qwen3")
    optimizer = arbcli.to_integers(model, lr=0.1)
    optimizers = optimizer, transformers.get_constant_schedule(optimizer)
    before = margin(model)
    pairs = [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt in prompts]
    reference = copy.deepcopy(model).requires_grad_(False)
    trl.DPOTrainer(
        model, reference, trl.DPOConfig(tmp_path / "dpo", beta=0.5, **settings),
        processing_class=tokenizer, train_dataset=datasets.Dataset.from_list(pairs),
        optimizers=optimizers,
    ).train()  # fmt: skip
    assert margin(reference) == before
    assert margin(model) - before > 0.8
    texts = datasets.Dataset.from_list([{"text": prompt + chosen} for prompt in prompts])
    trl.SFTTrainer(
        model, trl.SFTConfig(tmp_path / "sft", **settings | {"max_steps": 1}),
        processing_class=tokenizer, train_dataset=texts, optimizers=optimizers,
    ).train()  # fmt: skip
    assert optimizer.step_number == 9
