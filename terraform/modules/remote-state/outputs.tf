output "bucket" {
  description = "For backend.hcl of an environment."
  value       = aws_s3_bucket.state.bucket
}
