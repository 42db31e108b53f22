//! What AWS's refusals mean, and what to do next.

use super::cli::Refusal;

/// AWS's own message, what it means, and the next step.
pub(super) fn explain(refusal: &Refusal) -> String {
    let advice = match &refusal.code {
        Some(code) => by_code(code, &refusal.message),
        None => by_text(&refusal.message),
    };
    let code = refusal
        .code
        .as_ref()
        .map(|code| format!("{code}: "))
        .unwrap_or_default();
    let said = format!("aws {} said: {code}{}", refusal.call, refusal.message);
    match advice {
        Some((meaning, next_step)) => format!("{meaning} ({said}); next: {next_step}"),
        None => said,
    }
}

/// Whether another subnet, which is another availability zone, may have what this one has not.
pub(super) fn is_lack_of_capacity(refusal: &Refusal) -> bool {
    matches!(
        refusal.code.as_deref(),
        Some("InsufficientInstanceCapacity" | "InsufficientHostCapacity" | "Unsupported")
    )
}

/// Whether AWS has refused for good. A call that broke off, or broke on AWS's side, may have been carried out.
pub(super) fn nothing_was_done(refusal: &Refusal) -> bool {
    let broke_off = [
        "InternalError",
        "InternalFailure",
        "RequestTimeout",
        "ServiceUnavailable",
        "Unavailable",
    ];
    refusal
        .code
        .as_deref()
        .is_some_and(|code| !broke_off.contains(&code))
}

const FOUNDATION: &str = "run `cargo xtask tf apply staging`, or name another parameter with --foundation (docs/terraform.md)";

const SIGN_IN: &str = "sign in again (`aws sso login`, or new keys), see who you are with `aws sts get-caller-identity`, and repeat the command";

const CAPACITY: &str = "try again later, in another region (--region) or subnet (--subnet), with another --instance-type of the family, or reserve capacity and name it with --capacity-reservation";

const QUOTA: &str = "ask for more under Service Quotas, Amazon EC2, in this region: `Running On-Demand G and VT instances` for g types, `Running On-Demand P instances` for p types, and `All … Spot Instance Requests` with --spot; they count vCPUs";

/// Codes from the list of EC2's API error codes, and from those of Systems Manager and STS.
fn by_code(code: &str, message: &str) -> Option<(&'static str, &'static str)> {
    Some(match code {
        "VcpuLimitExceeded" | "InstanceLimitExceeded" | "MaxSpotInstanceCountExceeded" => (
            "this account's quota does not allow another instance of this type",
            QUOTA,
        ),
        "InsufficientInstanceCapacity" | "InsufficientHostCapacity" => (
            "AWS has no such instance free there at the moment",
            CAPACITY,
        ),
        "Unsupported" => (
            "this instance type is not offered there, or not in this form",
            "give a --subnet of another availability zone; `aws ec2 describe-instance-type-offerings --location-type availability-zone` lists where a type is offered",
        ),
        "ReservationCapacityExceeded" => (
            "the capacity reservation is used up",
            "wait until an instance in it has ended, or leave --capacity-reservation out",
        ),
        "SpotMaxPriceTooLow" => (
            "spot capacity costs more than on demand there",
            "leave --spot out",
        ),
        "InvalidCapacityReservationId.NotFound" | "InvalidCapacityReservationId.Malformed" => (
            "there is no such capacity reservation in this region",
            "compare --capacity-reservation with `aws ec2 describe-capacity-reservations`",
        ),
        "UnauthorizedOperation" | "AccessDenied" | "AccessDeniedException" => (
            "you are signed in, but not allowed to do this",
            "have the policy attached that `terraform output launcher_policy_arn` names; an encoded message is read with `aws sts decode-authorization-message`",
        ),
        "InvalidAMIID.NotFound" | "InvalidAMIID.Malformed" | "InvalidAMIID.Unavailable" => (
            "there is no such AMI in this region, or it is not shared with this account",
            "compare --ami and --region with the manifest of the build (docs/ami.md)",
        ),
        "InvalidSubnetID.NotFound" | "InvalidSubnet" | "InvalidGroup.NotFound" => (
            "subnet or security group is gone, or in another region",
            FOUNDATION,
        ),
        "InvalidParameterValue" if message.contains("IAM Instance Profile") => {
            ("the role for the instance is missing", FOUNDATION)
        }
        "InvalidParameterValue" if message.contains("InstanceType") => (
            "there is no such instance type",
            "compare --instance-type with `aws ec2 describe-instance-types`",
        ),
        "InvalidParameterValue" | "InvalidParameterCombination" | "InvalidRequest"
            if message.contains("architecture") =>
        {
            (
                "the image is not for the processor of this instance type",
                "choose an --instance-type of the image's architecture",
            )
        }
        "ParameterNotFound" => (
            "this account and region has not been prepared for validating AMIs",
            FOUNDATION,
        ),
        "ExpiredToken"
        | "ExpiredTokenException"
        | "RequestExpired"
        | "InvalidClientTokenId"
        | "UnrecognizedClientException"
        | "AuthFailure" => ("your AWS credentials are no longer, or not, valid", SIGN_IN),
        "SignatureDoesNotMatch" => (
            "AWS does not accept the signature: a wrong secret key, or this machine's clock is wrong",
            SIGN_IN,
        ),
        "OptInRequired" | "PendingVerification" => (
            "this account may not use the service or region yet",
            "enable the region under Account, AWS Regions; a new account is verified within hours",
        ),
        "RequestLimitExceeded" | "Throttling" | "ThrottlingException" => (
            "too many calls to AWS from this account at once",
            "repeat the command in a minute",
        ),
        _ => return None,
    })
}

/// What the CLI says by itself, before or instead of asking AWS.
fn by_text(message: &str) -> Option<(&'static str, &'static str)> {
    let says = |part: &str| message.contains(part);
    Some(if says("Unable to locate credentials") {
        (
            "there are no AWS credentials here",
            "sign in (`aws sso login`, `aws configure`, or AWS_PROFILE), see who you are with `aws sts get-caller-identity`, and repeat the command",
        )
    } else if says("config profile") && says("could not be found") {
        (
            "there is no such profile",
            "set AWS_PROFILE to one of `aws configure list-profiles`",
        )
    } else if says("You must specify a region") {
        ("no region is chosen", "give --region, or set AWS_REGION")
    } else if says("SSO") && (says("expired") || says("invalid") || says("does not exist"))
        || says("Token has expired")
        || says("token has expired")
    {
        ("your AWS session has expired", SIGN_IN)
    } else if says("Could not connect to the endpoint URL") || says("Connect timeout") {
        (
            "AWS could not be reached",
            "check the network, and that --region names a region that exists",
        )
    } else {
        return None;
    })
}

#[cfg(test)]
mod tests {
    use super::super::cli::Refusal;
    use super::{explain, is_lack_of_capacity, nothing_was_done};

    fn refusal(code: Option<&str>, message: &str) -> Refusal {
        Refusal {
            call: "ec2 run-instances".to_owned(),
            code: code.map(str::to_owned),
            message: message.to_owned(),
        }
    }

    #[test]
    fn every_known_refusal_keeps_what_aws_said_and_says_the_next_step() {
        let cases = [
            (
                Some("VcpuLimitExceeded"),
                "current vCPU limit of 0",
                "Running On-Demand P instances",
            ),
            (
                Some("InsufficientInstanceCapacity"),
                "We currently do not have sufficient p5.48xlarge capacity",
                "--capacity-reservation",
            ),
            (
                Some("UnauthorizedOperation"),
                "You are not authorized. Encoded authorization failure message: abc",
                "launcher_policy_arn",
            ),
            (
                Some("AccessDeniedException"),
                "is not authorized to perform: ssm:GetParameter",
                "launcher_policy_arn",
            ),
            (
                Some("InvalidAMIID.NotFound"),
                "The image id '[ami-1]' does not exist",
                "--region",
            ),
            (
                Some("ParameterNotFound"),
                "Parameter /x not found.",
                "cargo xtask tf apply staging",
            ),
            (
                Some("ExpiredToken"),
                "The security token included in the request is expired",
                "aws sso login",
            ),
            (
                Some("InvalidParameterValue"),
                "Value (x) for parameter iamInstanceProfile.name is invalid. Invalid IAM Instance Profile name",
                "cargo xtask tf apply staging",
            ),
            (
                Some("InvalidParameterValue"),
                "The architecture 'arm64' of the specified instance type does not match",
                "architecture",
            ),
            (
                Some("Unsupported"),
                "not supported in your requested Availability Zone",
                "--subnet",
            ),
            (
                None,
                "Unable to locate credentials. You can configure credentials by running \"aws configure\".",
                "aws sts get-caller-identity",
            ),
            (
                None,
                "The config profile (gone) could not be found",
                "list-profiles",
            ),
            (
                None,
                "You must specify a region. You can also configure your region by running \"aws configure\".",
                "--region",
            ),
            (
                None,
                "Error when retrieving token from sso: Token has expired and refresh failed",
                "aws sso login",
            ),
            (
                None,
                "The SSO session associated with this profile has expired or is otherwise invalid.",
                "aws sso login",
            ),
            (
                None,
                "Could not connect to the endpoint URL: \"https://ec2.eu-nowhere-1.amazonaws.com/\"",
                "--region",
            ),
        ];
        for (code, message, next_step) in cases {
            let text = explain(&refusal(code, message));
            let (before, after) = text.split_once("; next: ").expect(message);
            assert!(after.contains(next_step), "{text}");
            assert!(before.contains(message), "{text}");
        }
    }

    #[test]
    fn an_unknown_refusal_is_told_as_it_is() {
        assert_eq!(
            explain(&refusal(Some("Novel"), "something new")),
            "aws ec2 run-instances said: Novel: something new"
        );
    }

    #[test]
    fn only_a_clear_refusal_means_that_nothing_was_launched() {
        assert!(nothing_was_done(&refusal(Some("VcpuLimitExceeded"), "")));
        assert!(!nothing_was_done(&refusal(Some("InternalError"), "")));
        assert!(!nothing_was_done(&refusal(
            None,
            "Read timeout on endpoint URL"
        )));
    }

    #[test]
    fn another_zone_is_tried_only_for_lack_of_capacity() {
        assert!(is_lack_of_capacity(&refusal(
            Some("InsufficientInstanceCapacity"),
            ""
        )));
        assert!(!is_lack_of_capacity(&refusal(
            Some("VcpuLimitExceeded"),
            ""
        )));
        assert!(!is_lack_of_capacity(&refusal(None, "")));
    }
}
