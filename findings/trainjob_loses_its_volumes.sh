#!/usr/bin/env bash
# Kubeflow Trainer: is a TrainJob that mounts a volume for checkpoints valid for the next minor release of one apiVersion?
# A good guess says: yes; trainer.kubeflow.org/v1alpha1 is the same version in both, and a key that a typed model does not
# know is an error.
# Seen: between kubeflow-trainer-api 2.1 and 2.2, podTemplateOverrides became runtimePatches, under the same apiVersion.
# The models of the other release take the manifest without an error and leave the key out, in both directions: the job
# starts without its volume, and writes its checkpoints into the container.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/read.py" <<'PY'
from importlib.metadata import version

from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

volumes = {"volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": "checkpoints"}}]}
ways = {
    "podTemplateOverrides": [{"targetJobs": [{"name": "node"}], "spec": volumes}],
    "runtimePatches": [
        {
            "manager": "example.org/me",
            "trainingRuntimeSpec": {
                "template": {
                    "spec": {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": volumes}}}}]}
                }
            },
        }
    ],
}
for name, value in ways.items():
    job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": "run"},
        "spec": {"runtimeRef": {"name": "torch-distributed"}, name: value},
    }
    kept = "claimName" in str(TrainerV1alpha1TrainJob.from_dict(job).to_dict())
    print(f"{version('kubeflow-trainer-api')}: {name}: {'the volume is there' if kept else 'no error, no volume'}")
PY
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "pydantic==2.12.4" 2>/dev/null
for version in 2.1.0 2.2.0 2.3.0; do
    "$folder/venv/bin/pip" install -q --no-deps --target "$folder/$version" "kubeflow-trainer-api==$version" 2>/dev/null
done
echo "A good guess: an error, or the volume, six times."
for version in 2.1.0 2.2.0 2.3.0; do
    PYTHONPATH="$folder/$version" "$folder/venv/bin/python" "$folder/read.py"
done | tee "$folder/seen"
diff - "$folder/seen" <<'SEEN'
2.1.0: podTemplateOverrides: the volume is there
2.1.0: runtimePatches: no error, no volume
2.2.0: podTemplateOverrides: no error, no volume
2.2.0: runtimePatches: the volume is there
2.3.0: podTemplateOverrides: no error, no volume
2.3.0: runtimePatches: the volume is there
SEEN
