#!/usr/bin/env bash
# transformers' Trainer: is the loss and the norm that it logs, and clips by, that of the batch, however it is cut?
# A good guess says: yes; for one batch of eight rows, 8 x 1, 4 x 2 accumulated, and 4 on each of two processes are alike.
# Seen: for causal models only. Classifiers, masked models and T5 take num_items_in_batch and do not divide by it: loss and
# norm are multiplied by accumulation steps times processes, so that max_grad_norm clips that much harder, and SGD steps
# that much further.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "torch==2.13.0" "numpy==2.3.4" "transformers==5.24.0" "accelerate==1.15.0" 2>/dev/null
cat >"$folder/losses.py" <<'PY'
import os
import tempfile

import torch
import torch.distributed as dist
import transformers
from transformers import Trainer, TrainingArguments

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
MODELS = {
    "LlamaForCausalLM": transformers.LlamaConfig(**SIZES, num_key_value_heads=1),
    "BertForSequenceClassification": transformers.BertConfig(**SIZES, **STILL, num_labels=3),
    "BertForMaskedLM": transformers.BertConfig(**SIZES, **STILL),
    "T5ForConditionalGeneration": transformers.T5Config(**T5, decoder_start_token_id=0),
}
ranks = int(os.environ.get("WORLD_SIZE", "1"))
words = torch.randint(3, 60, (8, 8), generator=torch.Generator().manual_seed(0)).tolist()
for name, config in MODELS.items():
    rows = [{"input_ids": each, "labels": each[0] % 3 if "Classification" in name else each} for each in words]
    for accumulated in (1, 2) if ranks == 1 else (1,):
        torch.manual_seed(0)
        args = TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=8 // ranks // accumulated,
            gradient_accumulation_steps=accumulated,
            max_steps=1,
            logging_steps=1,
            max_grad_norm=1e9,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
        )
        model = getattr(transformers, name)(config)
        trainer = Trainer(model, args, train_dataset=rows, data_collator=transformers.default_data_collator)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        first = next(log for log in trainer.state.log_history if "loss" in log)
        if os.environ.get("RANK", "0") == "0":
            cut = f"{ranks} processes, {accumulated} accumulated"
            print(f"{name}, {cut}: loss {first['loss']:.2f}, norm {first['grad_norm']:.2f}", flush=True)
if dist.is_initialized():
    dist.destroy_process_group()
PY
"$folder/venv/bin/python" -c 'import accelerate, platform, torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__, "accelerate", accelerate.__version__, "python", platform.python_version())'
echo "A good guess: for each model, one loss and one norm."
cd "$folder"
export OMP_NUM_THREADS=1
{
  "$folder/venv/bin/python" "$folder/losses.py" 2>"$folder/errors"
  "$folder/venv/bin/torchrun" --standalone --nproc-per-node=2 "$folder/losses.py" 2>"$folder/errors2"
} | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
LlamaForCausalLM, 1 processes, 1 accumulated: loss 4.18, norm 1.23
LlamaForCausalLM, 1 processes, 2 accumulated: loss 4.18, norm 1.23
BertForSequenceClassification, 1 processes, 1 accumulated: loss 1.09, norm 0.75
BertForSequenceClassification, 1 processes, 2 accumulated: loss 2.18, norm 1.50
BertForMaskedLM, 1 processes, 1 accumulated: loss 4.17, norm 1.73
BertForMaskedLM, 1 processes, 2 accumulated: loss 8.33, norm 3.46
T5ForConditionalGeneration, 1 processes, 1 accumulated: loss 4.84, norm 1.55
T5ForConditionalGeneration, 1 processes, 2 accumulated: loss 9.67, norm 3.11
LlamaForCausalLM, 2 processes, 1 accumulated: loss 4.18, norm 1.23
BertForSequenceClassification, 2 processes, 1 accumulated: loss 2.18, norm 1.50
BertForMaskedLM, 2 processes, 1 accumulated: loss 8.33, norm 3.46
T5ForConditionalGeneration, 2 processes, 1 accumulated: loss 9.67, norm 3.11
SEEN
