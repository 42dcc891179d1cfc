"""Megatron's torch_dist layout: files of torch.distributed.checkpoint, read and written without Megatron.

FOLDER/  .metadata       pickled Metadata: the form of every tensor, its chunks, and the location of each chunk
         __0_0.distcp …  chunks one after another, each an archive written by torch.save
         common.pt       everything except the model's tensors (iteration, arguments, schedules)
         metadata.json   the name of this layout
"""
