"""Train a model: `python train.py zero.stage=3`, or under torchrun. The same as `dzero train`; settings: --help."""

if __name__ == "__main__":
    try:
        from dzero.__main__ import train

        train()
    except KeyboardInterrupt:  # in the first tenth of a second, while this is imported
        raise SystemExit(130) from None
