__version__ = '2.9.0+cu128'
cuda: Optional[str] = '12.8'
hip = None
