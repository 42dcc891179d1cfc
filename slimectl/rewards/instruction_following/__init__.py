"""Verifiers of instructions: IFEval and IFBench."""
