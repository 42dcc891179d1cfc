"""Megatron's torch_dist layout: files of torch.distributed.checkpoint, read and written without Megatron.

FOLDER/  .metadata       pickled Metadata: the form of every tensor, its chunks, and where each chunk lies
         __0_0.distcp …  chunks one after the other, each an archive as torch.save writes it
         common.pt       what is not a tensor of the model (iteration, arguments, schedules)
         metadata.json   which layout this is
"""
