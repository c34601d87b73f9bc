"""Training script: `python train.py zero.stage=3`, also with torchrun. Equivalent to `dzero train`; see --help."""

if __name__ == "__main__":
    try:
        from dzero.__main__ import train

        train()
    except KeyboardInterrupt:  # during the import, before `train` handles it
        raise SystemExit(130) from None
