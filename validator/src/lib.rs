//! `gpu-validator`: may this GPU node take work?
