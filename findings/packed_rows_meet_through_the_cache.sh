#!/usr/bin/env bash
# transformers, packed rows in a loop of one's own: are documents in one row, with position_ids that begin anew, kept apart?
# A good guess says: yes, with a model in training mode, and an attention mask of ones changes nothing.
# Seen: only with use_cache=False and without an attention mask. By default training mode makes a cache as well, and with
# it, or with a mask of ones, each document attends to those before it; no warning, for sdpa and eager alike.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "torch==2.13.0" "numpy==2.3.4" "transformers==5.24.0" 2>/dev/null
cat >"$folder/packed.py" <<'PY'
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = LlamaConfig(**SIZES, vocab_size=64, num_key_value_heads=1)
GPT2 = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
for kind, config in ((LlamaForCausalLM, LLAMA), (GPT2LMHeadModel, GPT2)):
    for attention in ("sdpa", "eager"):
        torch.manual_seed(0)
        model = kind._from_config(config, attn_implementation=attention).train()
        first, second = torch.randint(3, 60, (1, 5)), torch.randint(3, 60, (1, 6))
        alone = torch.cat([model(first).logits, model(second).logits], 1)
        row = torch.cat([first, second], 1)
        positions = torch.cat([torch.arange(5), torch.arange(6)])[None]
        ones = torch.ones_like(row)
        for said, more in {
            "nothing": {},
            "use_cache=False": {"use_cache": False},
            "use_cache=False, a mask of ones": {"use_cache": False, "attention_mask": ones},
        }.items():
            apart = torch.allclose(model(row, position_ids=positions, **more).logits, alone, atol=1e-5)
            print(f"{kind.__name__} {attention}, {said}: documents are {'apart' if apart else 'mixed'}", flush=True)
PY
"$folder/venv/bin/python" -c 'import platform, torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__, "python", platform.python_version())'
echo "A good guess: apart, in every line."
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/packed.py" 2>"$folder/errors" | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
LlamaForCausalLM sdpa, nothing: documents are mixed
LlamaForCausalLM sdpa, use_cache=False: documents are apart
LlamaForCausalLM sdpa, use_cache=False, a mask of ones: documents are mixed
LlamaForCausalLM eager, nothing: documents are mixed
LlamaForCausalLM eager, use_cache=False: documents are apart
LlamaForCausalLM eager, use_cache=False, a mask of ones: documents are mixed
GPT2LMHeadModel sdpa, nothing: documents are mixed
GPT2LMHeadModel sdpa, use_cache=False: documents are apart
GPT2LMHeadModel sdpa, use_cache=False, a mask of ones: documents are mixed
GPT2LMHeadModel eager, nothing: documents are mixed
GPT2LMHeadModel eager, use_cache=False: documents are apart
GPT2LMHeadModel eager, use_cache=False, a mask of ones: documents are mixed
SEEN
