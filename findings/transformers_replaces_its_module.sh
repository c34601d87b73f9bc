#!/usr/bin/env bash
# A program binds `import transformers as library` at its top, as most do, and puts a class of its own in a place there,
# library.AutoTokenizer = Mine, for its tests or for a framework. Is `library` the module that later imports read?
# A good guess says: yes, always; a module is in sys.modules once.
# Seen: until a model or a processor is first imported. transformers/processing_utils.py then executes the package's
# __init__ a second time, which puts a new lazy module into sys.modules. What was set on the first one is not seen any
# more by `from transformers import ...`, and what is set on it later is never seen. Nothing is told.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "transformers==5.24.0" "torch==2.13.0" "numpy==2.3.4" 2>/dev/null
cat >"$folder/one_module.py" <<'PY'
import sys

import transformers as library


class Mine:
    pass


print("transformers", library.__version__)
library.AutoTokenizer = Mine
from transformers import AutoTokenizer

print("before: the module is one:", sys.modules["transformers"] is library, "| mine is seen:", AutoTokenizer is Mine)
from transformers import LlamaForCausalLM

from transformers import AutoTokenizer

print("after LlamaForCausalLM: one:", sys.modules["transformers"] is library, "| mine is seen:", AutoTokenizer is Mine)
library.LlamaForCausalLM = Mine
from transformers import LlamaForCausalLM

print("set after it: mine is seen:", LlamaForCausalLM is Mine, "| classes are the same:", end=" ")
print(library.LlamaConfig is sys.modules["transformers"].LlamaConfig)
PY
echo "A good guess: one: True, mine is seen: True, in every line."
"$folder/venv/bin/python" "$folder/one_module.py" 2>"$folder/errors" | tee "$folder/seen"
grep -q "^before: the module is one: True | mine is seen: True" "$folder/seen"
grep -q "^after LlamaForCausalLM: one: False | mine is seen: False" "$folder/seen"
grep -q "^set after it: mine is seen: False | classes are the same: True" "$folder/seen"
echo "as found: importing a model makes the module anew, and what was set on the first one is lost"
