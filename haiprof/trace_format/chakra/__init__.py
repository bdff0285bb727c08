"""Chakra's file format (MLCommons, et_def.proto): protobuf messages by hand, one file per rank."""
